"""Reads Markdown documents: their headings, links, code and the commands in it."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from images.platforms import REPOSITORY

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
        return [str(token.attrs["href"]) for token in self._inlines("link_open")] + [
            str(token.attrs["src"]) for token in self._inlines("image")
        ]

    def anchors(self) -> set[str]:
        """Names of the headings as links spell them: lower case, words joined by hyphens."""
        headings = [after.content for token, after in pairwise(self._tokens()) if token.type == "heading_open"]
        return {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings}

    def code_lines(self) -> Iterator[str]:
        """Lines of code blocks, fenced or indented, and code inside of sentences."""
        for token in self._tokens():
            if token.type in ("fence", "code_block"):
                yield from token.content.replace("\\\n", " ").splitlines()
        yield from (token.content for token in self._inlines("code_inline"))

    def command_blocks(self) -> list[CommandBlock]:
        """Fenced blocks whose language is `sh`, in the order of the page."""
        return [
            CommandBlock(
                "".join(re.findall(r"^<!-- (.*) -->$", before.content.strip())),
                tuple(filter(None, block.content.splitlines())),
            )
            for before, block in pairwise(self._tokens())
            if block.type == "fence" and block.info == "sh"
        ]

    def commands(self) -> Iterator[list[str]]:
        """Commands with `make`, `millrace` or `python -m`, as words, from the program's name to the command's end."""
        for line in self.code_lines():
            words = _split(line)
            for index, word in enumerate(words):
                if index and not _begins_a_command(words[index - 1]):
                    continue
                if word == "make" and index + 1 < len(words):
                    yield ["make", *_until_end(words[index + 1 :])]
                elif word == "millrace" and index + 1 < len(words):
                    yield ["millrace", *_until_end(words[index + 1 :])]
                elif word.endswith("python") and words[index + 1 : index + 2] == ["-m"]:
                    yield ["python", *_until_end(words[index + 2 :])]

    def _tokens(self) -> list[Token]:
        return MarkdownIt("commonmark").parse(self.text)

    def _inlines(self, kind: str) -> Iterator[Token]:
        return (child for token in self._tokens() for child in token.children or () if child.type == kind)


def read_documents() -> list[Document]:
    """All documents but the changelogs, which also tell of what was removed. Empty in a copy that has no git."""
    return [Document(name) for name in list_files("*.md") if "CHANGELOG" not in name]


def read_runbooks() -> list[Document]:
    """Pages for operators, each of whose command blocks has a mark."""
    return [document for document in read_documents() if document.name.startswith("docs/operations/runbooks/")]


def list_files(*patterns: str) -> list[str]:
    """The repository's files that fit git's patterns, without those that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout
    return [name for name in listed.splitlines() if (REPOSITORY / name).exists()]


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quote that is an apostrophe
        return line.split()


def _begins_a_command(word: str) -> bool:
    """Can a command follow this word?"""
    return word in (*_ENDS_OF_A_COMMAND, "$") or re.match(r"[A-Z_]+=", word) is not None


def _until_end(words: list[str]) -> list[str]:
    end = next((index for index, word in enumerate(words) if word in _ENDS_OF_A_COMMAND), len(words))
    return words[:end]
