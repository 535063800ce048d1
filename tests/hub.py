"""A stand-in for the Hugging Face Hub on the loopback interface: data sets and models in a folder, as owner/name/files.

It answers what `datasets` and huggingface_hub ask while they stream: the card, the repository's revision, its tree, and
the files themselves, by HEAD, GET and GET of a range.
"""

import contextlib
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "5" * 40


class Hub:
    """Serves `root` while the block lasts. requests: (method, path) so far. gone: files that are no longer there, as a
    regular expression. cut: files of which the connection ends half way, likewise."""

    def __init__(self, root):
        self.root, self.requests, self.gone, self.cut = root, [], None, None

    def __enter__(self):
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def environment(self, cache):
        """What a child needs so that it asks this server and nobody else."""
        return {"HF_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}", "HF_HOME": cache, "NO_PROXY": "127.0.0.1",
                "HF_HUB_DISABLE_TELEMETRY": 1, "HF_HUB_DISABLE_XET": 1}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        """Stay quiet."""

    def answer(self):
        """Find who answers this path; a client that hangs up in the middle is no error."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urllib.parse.unquote(self.path.partition("?")[0])
        self.hub.requests.append((self.command, path))
        for pattern, respond in ((r"(?:/datasets)?/(\w+/\w+)/resolve/\w+/(.+)", self.file),
                                 (r"/api/(?:datasets|models)/(\w+/\w+)(?:/revision/\w+)?", self.repository),
                                 (r"/api/(?:datasets|models)/(\w+/\w+)/tree/\w+/?(.*)", self.tree)):
            if match := re.fullmatch(pattern, path):
                with contextlib.suppress(ConnectionError):
                    respond(*match.groups())
                return
        self.send(404, {"error": "no such path"})

    do_GET = do_HEAD = do_POST = answer

    def send(self, code, content, **headers):
        """Send `content`, bytes or what becomes JSON."""
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def repository(self, name):
        """What the API says about a repository."""
        if not (self.hub.root / name).is_dir():
            self.send(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        else:
            files = [path.relative_to(self.hub.root / name).as_posix() for path in (self.hub.root / name).rglob("*")]
            self.send(200, {"id": name, "sha": REVISION, "private": False, "gated": False, "tags": [],
                            "siblings": [{"rfilename": file} for file in files]})

    def tree(self, name, folder):
        """Files and folders of a folder, and of those below it when so asked."""
        repository = self.hub.root / name
        if not (repository / folder).is_dir():
            self.send(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
            return
        deep = "recursive=true" in self.path.lower()
        self.send(200, [{"type": "directory" if path.is_dir() else "file", "size": path.stat().st_size,
                         "path": path.relative_to(repository).as_posix(),
                         "oid": hashlib.sha1(str(path).encode()).hexdigest()}
                        for path in sorted((repository / folder).glob("**/*" if deep else "*"))])

    def file(self, name, path):
        """A file or a range of it."""
        file, headers = self.hub.root / name / path, {"X_Repo_Commit": REVISION, "Accept_Ranges": "bytes"}
        if not file.is_file() or (self.hub.gone and re.fullmatch(self.hub.gone, path)):
            self.send(404, b"", X_Error_Code="EntryNotFound", **headers)
        else:
            content = file.read_bytes()
            headers["ETag"] = f'"{hashlib.sha1(content).hexdigest()}"'
            span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if not span:
                self.send(200, content, **headers)
                return
            part = content[int(span[1]):int(span[2] or len(content)) + 1]
            if self.hub.cut and re.fullmatch(self.hub.cut, path):
                self.close_connection = True
                self.send(206, part[:len(part) // 2], Content_Length=len(part), **headers)
                return
            self.send(206, part, Content_Range=f"bytes {span[1]}-{int(span[1]) + len(part) - 1}/{len(content)}",
                      **headers)
