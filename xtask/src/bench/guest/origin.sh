# A web server on this machine that waits before each answer.
cat >"$WORK/origin.py" <<'END'
import http.server, os, sys, threading, time
path, latency, count = sys.argv[1], float(sys.argv[2]), sys.argv[3]
lock, sent, size = threading.Lock(), [0, 0], os.path.getsize(path)
class Origin(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 20
    disable_nagle_algorithm = True
    def answer(self, body):
        time.sleep(latency)
        words = self.headers.get("Range", "")[6:].split("-")
        first = int(words[0]) if words[0] else 0
        last = min(int(words[1]) if len(words) > 1 and words[1] else size - 1, size - 1)
        self.send_response(206 if words[0] else 200)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", '"one"')
        if words[0]:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        if body:
            with lock:
                sent[0] += last - first + 1
                sent[1] += 1
                with open(count, "w") as file:
                    file.write(f"{sent[0]} {sent[1]}")
            self.wfile.flush()
            with open(path, "rb") as file:
                while first <= last:
                    first += os.sendfile(self.connection.fileno(), file.fileno(), first, last - first + 1)
    def do_GET(self):
        self.answer(True)
    def do_HEAD(self):
        self.answer(False)
    def log_message(self, *words):
        pass
class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    def handle_error(self, *words):
        pass
server = Server(("127.0.0.1", 0), Origin)
print(server.server_port, flush=True)
server.serve_forever()
END
# origin FILE SECONDS: serves the file at $URL, and waits so long before each answer.
origin() {
    no_origin
    rm -f "$WORK/port" "$WORK/count"
    /usr/bin/python3 "$WORK/origin.py" "$1" "$2" "$WORK/count" >"$WORK/port" 2>"$SAID" &
    ORIGIN=$!
    for ((wait = 0; wait < 100; wait++)); do
        [[ ! -s $WORK/port ]] || break
        sleep 0.05
    done
    URL=http://127.0.0.1:$(<"$WORK/port")/image
}
no_origin() {
    [[ -z ${ORIGIN:-} ]] || { kill "$ORIGIN" && wait "$ORIGIN"; } 2>"$SAID"
    ORIGIN=
}
# Bytes that the origin has sent, and requests that it has answered with any.
sent() { if [[ -s $WORK/count ]]; then cut -d' ' -f1 "$WORK/count"; else echo 0; fi; }
requests() { if [[ -s $WORK/count ]]; then cut -d' ' -f2 "$WORK/count"; else echo 0; fi; }
