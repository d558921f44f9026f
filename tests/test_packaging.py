"""What the package says of itself: one version, addresses that agree, and a README that reads well on the index."""

import doctest
import importlib.util
import re
from pathlib import Path

import batchwright as bw

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hook = load(ROOT / "hatch_build.py")
wheel = load(ROOT / "tools" / "check_wheel.py")


def repository():
    return re.search(r'^Repository = "(.+)"$', PROJECT, re.MULTILINE)[1]


def test_the_citation_has_the_version_and_the_address_of_the_package():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {bw.__version__}\n" in citation
    assert f'repository-code: "{repository()}"' in citation


def test_all_addresses_are_below_the_one_of_the_repository():
    urls = PROJECT.partition("[project.urls]")[2].partition("\n[")[0]
    found = re.findall(r'"(https://[^"]+)"', urls)
    assert len(found) >= 4
    assert all(url.startswith(repository()) for url in found)


def test_no_link_of_the_readme_is_relative_on_the_index():
    text = hook.with_addresses((ROOT / "README.md").read_text(encoding="utf-8"), repository())
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 20
    assert all(link.startswith("https://") for link in links)
    assert f"{repository()}/raw/main/docs/images/loss_against_seconds.svg" in links
    assert not re.findall(r"(https://\S+){2}", " ".join(links).replace(" https", " \nhttps"))


def test_the_example_of_the_build_runs():
    failed, tried = doctest.testmod(hook)
    assert tried
    assert not failed


def test_what_the_wheel_must_hold_is_in_the_source():
    assert all((ROOT / "src" / "batchwright" / name).is_file() for name in wheel.NEEDED)


def test_the_source_package_holds_what_its_tests_read():
    included = re.findall(r'"([^"]+)"', PROJECT.partition("sdist]")[2].partition("]\n")[0])
    assert {"benchmarks", "docs", "tests", "tools", "examples", "hatch_build.py", "conftest.py"} <= set(included)
    assert all((ROOT / name).exists() for name in included)
