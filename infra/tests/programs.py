"""Stand-ins for helm, kubectl and terraform: small scripts on PATH that write down how they were called."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


class Programs:
    """A PATH on which only these programs, the shell's own and what the tests run on are found."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bin, self._log = folder / "bin", folder / "calls.txt"
        self._bin.mkdir(parents=True)
        for name in ("bash", "cat", "sleep", "grep", "git"):
            found = shutil.which(name)
            assert found, name
            (self._bin / name).symlink_to(found)
        monkeypatch.setenv("PATH", str(self._bin))

    def add(self, name: str, answer: str = "") -> None:
        """A program whose body is bash, run after the call was written down. Call it again to give another answer."""
        path = self._bin / name
        path.unlink(missing_ok=True)
        path.write_text(f'#!{self._bin}/bash\necho "{name} $*" >>"{self._log}"\n{answer}\n', encoding="utf-8")
        path.chmod(0o755)

    def add_real(self, name: str) -> None:
        found = shutil.which(name, path="/usr/local/bin:/usr/bin:/bin")
        assert found, name
        (self._bin / name).unlink(missing_ok=True)
        (self._bin / name).symlink_to(found)

    def add_terraform(self, answer: str) -> None:
        """A terraform that evaluates a stack's variables, and answers with this body of bash otherwise."""
        self.add_real("terraform")
        real = (self._bin / "terraform").resolve()
        self.add("terraform", f'[[ "$*" != *millrace-variables* ]] || exec {real} "$@"\n{answer}')

    def remove(self, name: str) -> None:
        (self._bin / name).unlink()

    @property
    def calls(self) -> list[str]:
        return self._log.read_text(encoding="utf-8").splitlines() if self._log.exists() else []

    def forget_calls(self) -> None:
        self._log.unlink(missing_ok=True)
