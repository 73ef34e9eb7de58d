"""Fetching from a hub: a local HTTP server that speaks as much of its language as the client needs."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import pathlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from jspec.errors import JspecError
from jspec.target import hub, loading, memory
from tests.target import folders, test_parity

constants = pytest.importorskip("huggingface_hub.constants", reason="the hub's client is no requirement of jspec")

REPO = "owner/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Server(http.server.ThreadingHTTPServer):
    """Serves the files of one folder as a repository.

    Attributes:
      log: (method, file, range header) of each request for a file.
      cut: files whose next download breaks off half-way.
      broken: files that cannot be downloaded.
    """

    daemon_threads = True

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.log: list[tuple[str, str, str | None]] = []
        self.cut: set[str] = set()
        self.broken: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self, end: str = "") -> list[str]:
        return [file for method, file, _ in self.log if method == "GET" and file.endswith(end)]

    def handle_error(self, request, client_address) -> None:
        pass  # a client that hangs up


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        if path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/main"):
            files = [{"rfilename": p.name, "size": p.stat().st_size} for p in sorted(self.server.folder.iterdir())]
            self.send(json.dumps({"id": REPO, "sha": COMMIT, "siblings": files}).encode(), body)
            return
        start, _, file = path.partition("/resolve/")
        file = file.partition("/")[2]
        held = self.server.folder / file
        if start != f"/{REPO}" or not file or not held.is_file():
            self.send(b"{}", body, status=404, headers={"X-Error-Code": "EntryNotFound"})
            return
        self.server.log.append((self.command, file, self.headers.get("Range")))
        data = held.read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if body and file in self.server.broken:
            self.send(b"{}", body, status=403)
        elif self.headers.get("Range"):
            begin = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
            span = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}
            self.send(data[begin:], body, status=206, headers=headers | span)
        elif body and file in self.server.cut:
            self.server.cut.remove(file)
            self.send(data, body, headers=headers, only=len(data) // 2)
        else:
            self.send(data, body, headers=headers)

    def send(self, data: bytes, body: bool, *, status: int = 200, headers=None, only: int | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data[:only])
        if only is not None:
            self.close_connection = True
            self.connection.close()


@pytest.fixture
def served(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with a checkpoint of three shards and much that nobody needs, and an empty cache."""
    config = folders.CONFIGS["llama"]
    folder = folders.write(tmp_path / "served", config, folders.tensors(config), shards=3)
    for name in ("pytorch_model.bin", "model.onnx", "tf_model.h5", "photo.png"):
        (folder / name).write_bytes(b"x" * 100)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def shard(n: int) -> str:
    return f"model-0000{n}-of-00003.safetensors"


def test_a_hub_id_loads_and_only_what_is_needed_travels(served):
    checkpoint = loading.load(REPO)
    test_parity.check(checkpoint, "llama")  # known-failures LD-5
    assert checkpoint.name == "tiny" and checkpoint.license == "mit" and COMMIT in checkpoint.notes[0]
    assert set(served.downloads()) == {
        *("config.json", "tokenizer.json", "tokenizer_config.json", "README.md", hub.shards.INDEX),
        *(shard(n) for n in (1, 2, 3)),
    }
    served.log.clear()
    loading.load(REPO)
    assert served.downloads() == []  # nothing twice


def test_a_broken_connection_is_taken_up_where_it_broke(served, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)  # what the client holds before it writes
    served.cut.add(shard(2))
    checkpoint = loading.load(REPO)
    half = (served.folder / shard(2)).stat().st_size // 2
    asked = [span for method, file, span in served.log if method == "GET" and file == shard(2)]
    assert asked[0] is None and asked[1].startswith("bytes=")
    assert 0 < int(asked[1].removeprefix("bytes=").rstrip("-")) <= half
    np.testing.assert_array_equal(
        checkpoint.params.embed, folders.tensors(folders.CONFIGS["llama"])["model.embed_tokens.weight"]
    )


def test_a_second_try_fetches_only_what_is_missing(served):
    served.broken.add(shard(2))
    with pytest.raises(JspecError, match=shard(2)):
        loading.load(REPO)
    served.broken.clear()
    served.log.clear()
    loading.load(REPO)
    assert served.downloads() == [shard(2), shard(3)]


def test_offline_mode(served, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(JspecError, match="`HF_HUB_OFFLINE` is set"):
        loading.load(REPO)
    assert served.log == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    online = loading.load(REPO)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    served.log.clear()
    assert loading.load(REPO).fingerprint == online.fingerprint
    assert served.log == []


def test_offline_with_half_a_copy(served, monkeypatch):
    """known-failures LD-9: a download that was broken off."""
    served.broken.add(shard(3))
    with pytest.raises(JspecError):
        loading.load(REPO)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(JspecError, match=f"not there: `{shard(3)}`"):
        loading.load(REPO)


def test_without_a_network_the_copy_is_used_and_told(served, monkeypatch):
    loading.load(REPO)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in loading.load(REPO).notes[0]


@pytest.mark.parametrize("name", ["owner/absent", "owner/tiny@branch"])
def test_what_is_not_there(served, name):
    repo, _, revision = name.partition("@")
    with pytest.raises(JspecError, match=f"`{repo}` could not be fetched"):
        loading.load(repo, revision=revision or None)


def test_nothing_to_read(served):
    for path in served.folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(JspecError, match=r"holds `pytorch_model.bin`, `tf_model.h5`"):
        loading.load(REPO)


def edit_config(served: Server, **changes) -> None:
    config = json.loads((served.folder / "config.json").read_text()) | changes
    (served.folder / "config.json").write_text(json.dumps(config))


def test_refused_before_the_weights_travel(served, monkeypatch):
    edit_config(served, model_type="mamba")
    with pytest.raises(JspecError, match="`mamba`"):
        loading.load(REPO)
    assert served.downloads("0003.safetensors") == []


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_what_does_not_fit_is_refused_before_it_travels(served, monkeypatch, what):
    if what == "memory":
        monkeypatch.setattr(memory, "available", lambda: 1000)
    else:
        # Room for each file alone, which is what the hub's client looks at, but not for all the weights.
        weights = sum(path.stat().st_size for path in served.folder.glob("*.safetensors"))
        full = functools.partial(hub.shutil._ntuple_diskusage, 10**9, 10**9)
        monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: full(weights - 1))
    with pytest.raises(JspecError, match=f"`{REPO}` take"):
        loading.load(REPO)
    assert served.downloads("0003.safetensors") == []


def test_an_index_that_leads_elsewhere(served):
    index = served.folder / hub.shards.INDEX
    index.write_text(json.dumps({"weight_map": {"x": "../../secret.safetensors"}}))
    with pytest.raises(JspecError, match="secret"):
        loading.load(REPO)


def test_without_the_client(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(JspecError, match="`huggingface_hub` is not installed"):
        hub.fetch(REPO)


@pytest.mark.parametrize(
    ("name", "good"),
    [("a/b", True), ("Qwen/Qwen3-0.6B", True), ("a", False), ("a/b/c", False), ("../b", False), ("a/..", False)],
)
def test_hub_ids(name, good):
    assert hub.is_repo(name) == good
