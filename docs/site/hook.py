"""Hook of mkdocs: adds the READMEs of the folders and the generated reference to the pages of `docs/`.

The site has the tree of the repository, with `docs/` as its root: `services/trainer/README.md` becomes
`services/trainer/`. Links between pages are relative to the files in the repository, where they can be followed too;
the hook translates them. A link to a file that is no page becomes plain text, because the site has no source code.

mkdocs loads this file by its path, in an environment that has mkdocs and none of the services' packages.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[2]
DOCS = "docs/"
READMES = (
    "README.md",
    "CONTRIBUTING.md",
    "services/*/README.md",
    "images/README.md",
    "k8s/README.md",
    "infra/README.md",
    "infra/stacks/*/README.md",
    "tests/cluster/kit/README.md",
)
REFERENCE = "reference/"
GENERATOR = ".venv/bin/python", "-m", "docs.site.reference"

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside `docs/`."""
    for pattern in READMES:
        for path in sorted(REPOSITORY.glob(pattern)):
            name = path.relative_to(REPOSITORY).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    folder = REPOSITORY / "dist/reference"
    done = subprocess.run([*GENERATOR, str(folder)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PluginError(f"{' '.join(GENERATOR)} ended with {done.returncode}. Run `make docs`.\n{done.stderr}")
    for path in sorted(folder.glob("*.md")):
        files.append(File.generated(config, REFERENCE + path.name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Translate the links of a page to the site's tree."""
    if page.file.src_uri.startswith(REFERENCE):
        return markdown
    source = page.file.src_uri if page.file.generated_by else DOCS + page.file.src_uri
    place = posixpath.dirname(source)

    def translate(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        path, sharp, anchor = target.partition("#")
        if not path or "://" in path:
            return link[0]
        name = posixpath.normpath(posixpath.join(place, path))
        if (REPOSITORY / name).is_dir():
            name += "/README.md"
        uri = name.removeprefix(DOCS)
        if files.get_file_from_path(uri) is None:
            return text if (REPOSITORY / name).exists() else link[0]  # mkdocs reports what leads nowhere
        here = posixpath.dirname(page.file.src_uri)
        return f"{image}[{text}]({posixpath.relpath(uri, here or '.')}{sharp}{anchor})"

    return _LINK.sub(translate, markdown)
