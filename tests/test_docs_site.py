"""The site: every page is in the menu, every file in the menu exists, and links lead somewhere."""

import doctest
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
MENU = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2])


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = load("docs_site")


def anchors_of(path):
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_the_menu_has_every_page_once():
    assert sorted(MENU) == PAGES


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *(f"docs/{page}" for page in PAGES)])
def test_links_lead_to_files_and_titles_that_exist(name):
    path = ROOT / name
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)", path.read_text(encoding="utf-8")):
        if "://" in target or not (target or anchor):
            continue
        found = (path.parent / target).resolve() if target else path
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            assert anchor in anchors_of(found), f"{target}#{anchor}"


def test_a_link_out_of_the_guides_leads_to_the_repository():
    moved = site.moved("[a](../benchmarks/README.md) [b](planning.md#ranks) [c](nowhere.md)", DOCS)
    assert moved == f"[a]({site.repository()}/blob/main/benchmarks/README.md) [b](planning.md#ranks) [c](nowhere.md)"


def test_a_file_of_the_repository_that_is_a_page_is_linked_as_one():
    assert site.moved("[x](docs/planning.md) [y](CHANGELOG.md)", ROOT) == "[x](planning.md) [y](changelog.md)"


def test_pages_that_show_a_file_name_one_that_exists():
    shown = [re.match(r"---\nshows: (.+)\n---", (DOCS / page).read_text(encoding="utf-8")) for page in PAGES]
    assert sorted(found[1] for found in shown if found) == ["CHANGELOG.md", "CONTRIBUTING.md", "README.md"]
    assert all((ROOT / found[1]).exists() for found in shown if found)


def test_the_examples_of_the_hooks_run():
    failed, tried = doctest.testmod(site)
    assert tried
    assert not failed


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_search_without_a_server_gets_its_questions_and_gives_its_answers():
    script = """
    globalThis.location = { protocol: "file:" };
    globalThis.window = globalThis;
    const asked = [];
    const inside = Object.assign(new EventTarget(), { MessageEvent, document: {
      createElement: () => ({}), documentElement: { append: (element) => element.onload() } } });
    inside.addEventListener("message", (event) => inside.postMessage(event.data + 1));
    globalThis.document = { createElement: () => ({ contentWindow: inside }), documentElement: { append() {} } };
    require("vm").runInThisContext(require("fs").readFileSync(process.argv[1], "utf8"));
    const worker = new Worker("search.js");
    worker.onmessage = (event) => asked.push(event.data);
    worker.postMessage(41);
    setTimeout(() => console.log(JSON.stringify(asked)), 10);
    """
    answer = subprocess.run(["node", "-e", script, str(DOCS / "search_worker.js")], capture_output=True, text=True)
    assert answer.stdout == "[42]\n", answer.stderr
