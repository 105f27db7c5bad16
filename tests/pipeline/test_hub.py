"""Models of the hub, from a server that answers as the hub does: what is asked, what comes, what a refusal says."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch

import ergoflow
from ergoflow.cli import main
from ergoflow.pipeline.check import run_check
from ergoflow.pipeline.hub import is_hub_id
from ergoflow.pipeline.pretrained import find_model, pretrained_models

FIRST, SECOND = "1" * 40, "2" * 40
SMALL = "kf64-ergoformer"
# In the repository, but nothing that a model is made of.
OTHERS = {
    "README.md": b"# A model",
    "pytorch_model.bin": b"\x80\x04.",
    "modeling.py": b"raise SystemExit",
    "rollout/scores.json": b"{}",
}


class Hub(ThreadingHTTPServer):
    """A server with the hub's three endpoints: what a revision is, which files it has, and the files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        # Per repository the commit of each revision; per commit its files.
        self.revisions: dict[str, dict[str, str]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.status = 200
        self.asked: list[str] = []

    @property
    def downloads(self) -> list[str]:
        return sorted(path.partition(f"/resolve/{FIRST}/")[2] for path in self.asked if path.startswith("GET /someone"))

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of a path."""
        if self.status != 200:
            return self.status, {}, b""
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repository, what, revision = "/".join(parts[2:4]), parts[4], "/".join(parts[5:])
        else:
            repository, what, revision = "/".join(parts[:2]), parts[2], parts[3]
        known = self.revisions.get(repository)
        if known is None:
            # Without a token the hub answers 401, which its client takes for an unknown name behind https only.
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        commit = known.get(revision, revision if revision in known.values() else None)
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = self.files[commit]
        if what == "revision":
            return 200, {}, json.dumps({"id": repository, "sha": commit}).encode()
        if what == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            return 200, {}, json.dumps(entries).encode()
        assert what == "resolve"
        if repository in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        content = files["/".join(parts[4:])]
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}, content


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Hub)
        self.server.asked.append(f"{self.command} {self.path}")
        status, headers, body = self.server.answer(self.path)
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


def forget_the_client() -> None:
    """The client reads its settings when it is imported, and gives its log a handler."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]
    logging.getLogger("huggingface_hub").handlers.clear()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the smallest shipped model as someone/small, and an empty cache."""
    if importlib.util.find_spec("huggingface_hub") is None:
        pytest.skip("needs the package huggingface_hub (extra `hub`)")
    hub = Hub()
    model = {path.name: path.read_bytes() for path in pretrained_models()[SMALL].iterdir()}
    hub.revisions["someone/small"], hub.files[FIRST] = {"main": FIRST}, model | OTHERS
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGINGFACE_CO_STAGING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    forget_the_client()
    yield hub
    if "huggingface_hub" in sys.modules:
        sys.modules["huggingface_hub"].close_session()
    forget_the_client()
    hub.stop()
    thread.join()


def assert_same_step(one: torch.nn.Module, other: torch.nn.Module) -> None:
    state = torch.randn(2, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(one(state), other(state))


def test_a_model_of_the_hub_is_the_exported_one_bit_for_bit(hub: Hub) -> None:
    assert_same_step(ergoflow.load("someone/small"), ergoflow.load(pretrained_models()[SMALL]))
    run_check(find_model("someone/small")).require(Path("someone/small"))


def test_nothing_but_the_files_of_a_model_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    ergoflow.load("someone/small")
    names = sorted(path.name for path in pretrained_models()[SMALL].iterdir())
    assert hub.downloads == names
    assert sorted(path.name for path in find_model("someone/small").rglob("*")) == names
    assert find_model("someone/small").is_relative_to(tmp_path / "cache" / "hub")


def test_a_model_is_downloaded_once_and_loads_without_a_network(hub: Hub) -> None:
    first = ergoflow.load("someone/small")
    count = len(hub.downloads)
    ergoflow.load("someone/small")
    assert len(hub.downloads) == count
    hub.stop()
    assert_same_step(ergoflow.load("someone/small"), first)


@pytest.mark.parametrize("revision", ["v2", "refs/pr/1", SECOND])
def test_a_revision_is_the_one_that_is_named(revision: str, hub: Hub, tmp_path: Path) -> None:
    later = shutil.copytree(pretrained_models()[SMALL], tmp_path / "later")
    run = json.loads((later / "run.json").read_text())
    (later / "run.json").write_text(json.dumps(run | {"step_seconds": 2 * run["step_seconds"]}))
    hub.revisions["someone/small"] |= {"v2": SECOND, "refs/pr/1": SECOND}
    hub.files[SECOND] = {path.name: path.read_bytes() for path in later.iterdir()}
    assert_same_step(ergoflow.load(f"someone/small@{revision}"), ergoflow.load(later))
    assert_same_step(ergoflow.load("someone/small@main"), ergoflow.load(pretrained_models()[SMALL]))


def test_a_run_folder_on_the_hub_loads_without_test_windows(hub: Hub) -> None:
    for name in ("check.npz", "check.json"):
        del hub.files[FIRST][name]
    assert_same_step(ergoflow.load("someone/small"), ergoflow.load(pretrained_models()[SMALL]))


def test_a_folder_comes_before_the_hub_and_a_path_is_never_an_id(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="choose one of"):
        ergoflow.load(Path("someone/small"))
    shutil.copytree(pretrained_models()[SMALL], tmp_path / "someone" / "small")
    assert find_model("someone/small") == Path("someone/small")
    ergoflow.load("someone/small")
    assert hub.asked == []


@pytest.mark.parametrize(
    "name", ["small", "./runs/small", "/runs/small", "runs/small/seed0", "../small", "a/b@", "a/b c"]
)
def test_a_name_of_another_form_is_not_looked_up(name: str, hub: Hub) -> None:
    assert not is_hub_id(name)
    with pytest.raises(ValueError, match=r"hub id owner/name was expected.*choose one of"):
        ergoflow.load(name)
    assert hub.asked == []


def message(hub_id: str) -> str:
    """What `ergoflow.load` says in refusing, which is one line."""
    with pytest.raises(ValueError, match=re.escape(hub_id.partition("@")[0])) as refusal:
        ergoflow.load(hub_id)
    assert len(str(refusal.value).splitlines()) == 1
    return str(refusal.value)


@pytest.mark.parametrize("name", ["someone/smal", "some--one/small"])
def test_an_unknown_repository_is_named(name: str, hub: Hub) -> None:
    assert "is no folder and no repository that the hub shows you; correct it, or run `hf auth login`" in message(name)


@pytest.mark.parametrize("revision", ["v3", "3" * 40])
def test_an_unknown_revision_is_named(revision: str, hub: Hub) -> None:
    text = message(f"someone/small@{revision}")
    assert f"a revision of someone/small was expected, got '{revision}'" in text
    assert "name a branch, a tag or a whole commit hash" in text


def test_a_gated_repository_says_whom_to_ask(hub: Hub) -> None:
    hub.gated.add("someone/small")
    text = message("someone/small")
    assert "those whom its owner admits; ask for access on its page, then run `hf auth login`" in text


def test_a_repository_that_is_no_model_says_what_it_lacks(hub: Hub) -> None:
    del hub.files[FIRST]["run.json"]
    assert "it lacks run.json; choose another model, or upload that folder whole" in message("someone/small")
    hub.revisions["someone/text"], hub.files[SECOND] = {"main": SECOND}, {"README.md": b"# Words"}
    assert "lacks recipe.json, run.json, training.json, scores.json, model.safetensors;" in message("someone/text")


def test_without_a_network_a_model_that_is_not_in_the_cache_is_refused(hub: Hub) -> None:
    hub.stop()
    text = message("someone/small")
    assert "Connection refused" in text
    assert "check network and token, or name a folder" in text


def test_offline_mode_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in message("someone/small")
    assert hub.asked == []


def test_a_hub_that_fails_is_named(hub: Hub) -> None:
    hub.status = 503
    assert "503 Service Unavailable" in message("someone/small")


def test_a_page_in_place_of_the_hub_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network that wants a login gives it."""
    monkeypatch.setattr(hub, "answer", lambda _: (200, {}, b"<html>Welcome</html>"))
    assert "the hub does not answer as it should (Expecting value" in message("someone/small")


def test_the_client_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, ergoflow; ergoflow.load(sys.argv[1]); sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, SMALL], check=False).returncode == 0


def test_without_the_client_the_way_to_install_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert 'run `pip install "ergoflow[hub]"`' in message("someone/small")


def test_the_demo_looks_a_model_up_on_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["ergoflow", "demo", "--pretrained", "someone/smal", "--root", str(tmp_path / "root")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        main()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2
    assert "no repository that the hub shows you" in line
    assert any("/api/models/someone/smal/" in path for path in hub.asked)
