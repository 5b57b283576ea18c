"""Reads Markdown documents: their headings, links, code and the commands in it."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.imports import REPOSITORY

_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *$", re.MULTILINE)
_MARKED = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ENDS_OF_A_COMMAND = ("&&", "||", "|", ";", ">", "2>", "&", "#")


@dataclass(frozen=True)
class CommandBlock:
    """A fenced block of shell commands, and the comment above it that says who runs them."""

    mark: str
    """Text of the comment, such as `runs here` or `needs-cluster`; empty without a comment."""
    lines: tuple[str, ...]
    """One command a line, with its comment."""


@dataclass(frozen=True)
class Document:
    """One Markdown file of the repository."""

    name: str
    """Path from the repository's root, or an absolute path."""

    @property
    def path(self) -> Path:
        return REPOSITORY / self.name

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def links(self) -> list[str]:
        """Targets of the links and pictures outside of code."""
        return _LINK.findall(_FENCED.sub("", self.text))

    def anchors(self) -> set[str]:
        """Names of the headings as links spell them: lower case, words joined by hyphens."""
        headings = (heading.lower().replace(" ", "-") for heading in _HEADING.findall(_FENCED.sub("", self.text)))
        return {re.sub(r"[^\w-]", "", heading) for heading in headings}

    def code_lines(self) -> Iterator[str]:
        """Lines of code blocks, fenced or indented, and code inside of sentences."""
        text = self.text
        for block in _FENCED.findall(text):
            yield from block.replace("\\\n", " ").splitlines()[1:-1]
        text = _FENCED.sub("", text)
        indented = re.findall(r"(?:^ {4,}.*\n?)+", text, re.MULTILINE)
        for block in indented:
            yield from block.replace("\\\n", " ").splitlines()
        for code in _INLINE.findall(re.sub(r"(?:^ {4,}.*\n?)+", "", text, flags=re.MULTILINE)):
            yield " ".join(code.split())

    def command_blocks(self) -> list[CommandBlock]:
        """Fenced blocks whose language is `sh`, in the order of the page."""
        found = _MARKED.findall(self.text)
        return [CommandBlock(mark, tuple(filter(None, block.splitlines()))) for mark, block in found]

    def commands(self) -> Iterator[list[str]]:
        """Commands with `make` or `python -m`, as words, from the program's name to the command's end."""
        for line in self.code_lines():
            words = _split(line)
            for index, word in enumerate(words):
                if index and not _begins_a_command(words[index - 1]):
                    continue
                if word == "make" and index + 1 < len(words):
                    yield ["make", *_until_end(words[index + 1 :])]
                elif word.endswith("python") and words[index + 1 : index + 2] == ["-m"]:
                    yield ["python", *_until_end(words[index + 2 :])]


def read_documents() -> list[Document]:
    """All documents but the changelogs, which also tell of what was removed. Empty in a copy that has no git."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    return [Document(name) for name in listed if "CHANGELOG" not in name and (REPOSITORY / name).exists()]


def read_runbooks() -> list[Document]:
    """Pages for operators, each of whose command blocks has a mark."""
    return [document for document in read_documents() if document.name.startswith("docs/operations/runbooks/")]


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quote that is an apostrophe
        return line.split()


def _begins_a_command(word: str) -> bool:
    """Can a command follow this word?"""
    return word in (*_ENDS_OF_A_COMMAND, "$") or re.match(r"[A-Z_]+=", word) is not None


def _until_end(words: list[str]) -> list[str]:
    for index, word in enumerate(words):
        if word in _ENDS_OF_A_COMMAND:
            return words[:index]
    return words
