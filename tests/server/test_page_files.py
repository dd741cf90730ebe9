"""The page's files over HTTP: whole, packaged, open, and strict about what a browser may do with them."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.server.api_keys import make_api_keys
from jaxserve.server.app import ServerOptions
from jaxserve.server.live_feed import LiveFeed
from jaxserve.server.page_files import CONTENT_TYPES, Page, read_page_files
from jaxserve.tokenizer import Tokenizer
from tests.server import http
from tests.server.copy_engine import CopyEngine
from tests.server.running_server import RunningServer

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "jaxserve" / "server" / "page"
FILES = sorted(path.name for path in FOLDER.iterdir())
MAKES_MARKUP = (
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "setHTML", "srcdoc", "DOMParser"),
    *(r"document\.write", r"\beval\b", "new Function", "createContextualFragment"),
)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[RunningServer]:
    options = ServerOptions(keys=make_api_keys([("alice", "k1")]))
    with RunningServer(CopyEngine(tokenizer), options, extensions=[LiveFeed(), Page()]) as running:
        yield running


def test_all_files_are_served_without_a_key_and_under_strict_rules(server: RunningServer) -> None:
    for path in ["/", *(f"/page/{name}" for name in FILES)]:
        reply = http.request(server.base_url, "GET", path)
        name = path.rsplit("/", 1)[1] or "index.html"
        assert reply.status == 200, path
        assert reply.body == (FOLDER / name).read_bytes()
        assert reply.headers["content-type"] == CONTENT_TYPES["." + name.rsplit(".", 1)[1]]
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        rules = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
        assert rules.pop("default-src") == "'none'"
        assert rules.pop("frame-ancestors") == "'none'"
        assert set(rules.values()) <= {"'self'", "'none'"}, "nothing foreign, nothing inline, no eval"


def test_a_browser_that_has_a_file_gets_it_once(server: RunningServer) -> None:
    first = http.request(server.base_url, "GET", "/page/main.js")
    again = http.request(
        server.base_url, "GET", "/page/main.js", headers={"If-None-Match": first.headers["etag"]}
    )
    assert (again.status, again.body) == (304, b"")
    other = http.request(server.base_url, "GET", "/page/main.js", headers={"If-None-Match": '"other"'})
    assert other.status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page/../app.py",
        "/page/..%2fapp.py",
        "/page/%2e%2e%2fapp.py",
        "/page/%2fetc%2fpasswd",
        "/page/main.js%00",
        "/page/",
        "/page/none.js",
    ],
)
def test_nothing_else_is_there(server: RunningServer, path: str) -> None:
    reply = http.request(server.base_url, "GET", path, headers={"Authorization": "Bearer k1"})
    assert reply.status == 404
    assert b"import" not in reply.body


def test_everything_else_still_wants_the_key(server: RunningServer) -> None:
    for path in ("/v1/models", "/debug/engine/stream", "/page", "/index.html", "//", "/page/a/b", "/nowhere"):
        assert http.request(server.base_url, "GET", path).status == 401, path
    assert http.post(server.base_url, "/v1/chat/completions", {}).status == 401


def test_what_is_open_stays_open(server: RunningServer) -> None:
    for path in ("/health", "/ready", "/metrics", "/version", "/openapi.json"):
        assert http.request(server.base_url, "GET", path).status == 200, path


def test_the_document_names_every_route(server: RunningServer) -> None:
    document = http.request(server.base_url, "GET", "/openapi.json").json
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    served = {
        (route.method, route.resource.canonical)
        for route in server.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert described == served
    assert document["paths"]["/"]["get"]["security"] == []


def test_the_page_refers_to_nothing_foreign_and_to_nothing_missing() -> None:
    files = {name: file.body.decode() for name, file in read_page_files().items()}
    assert set(files) == set(FILES)
    used = {"index.html"}
    for name, text in files.items():
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), f"{name} names a foreign host"
        used |= set(re.findall(r'(?:src|href)="page/([^"]+)"', text))
        used |= set(re.findall(r'from "\./([^"]+)"', text))
        imports = re.findall(r'from "([^"]+)"', text)
        assert all(one.startswith("./") for one in imports), name
    assert used == set(files), "a file is missing, or nobody uses it"


def test_no_text_ever_becomes_html() -> None:
    """Text of users and models reaches the page as text; nothing in it could make markup or code of a string."""
    for name, file in read_page_files().items():
        text = file.body.decode()
        if name.endswith(".js"):
            assert not re.search("|".join(MAKES_MARKUP), text), name
        if name.endswith(".html"):
            assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", text), (
                "inline code or style"
            )


def test_a_key_is_kept_in_the_tab_alone() -> None:
    for name, file in read_page_files().items():
        text = file.body.decode()
        assert "localStorage" not in text
        assert "cookie" not in text.lower()
        assert name == "api.js" or "sessionStorage" not in text


def test_a_built_wheel_has_the_page(tmp_path: Path) -> None:
    """Built as pip builds it, from a copy that has no build folder."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        (source / name).write_bytes((REPOSITORY / name).read_bytes())
    for folder in ("jaxserve", "pallas_kernels"):
        (source / folder).symlink_to(REPOSITORY / folder)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    result = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    with zipfile.ZipFile(next(source.glob("*.whl"))) as wheel:
        packed = {name for name in wheel.namelist() if name.startswith("jaxserve/server/page/")}
    assert packed == {f"jaxserve/server/page/{name}" for name in FILES}
