"""Packages all of the repository as one import root: the other packages are in `millrace/tree`."""

from __future__ import annotations

from setuptools import find_namespace_packages, setup

TREE = find_namespace_packages(
    include=["services*", "deploy*", "k8s*", "infra*", "images*", "recipes"],
    exclude=["*.tests*", "services.common.testing*", "*__pycache__*"],
)
setup(packages=["millrace", *(f"millrace.tree.{each}" for each in TREE)], package_dir={"millrace.tree": "."})
