"""A receiver of OTLP profiles over gRPC and HTTP, on the published definitions (PyPI opentelemetry-proto): it decodes every message, checks the rules of
dictionaries, and writes each sample with its whole stack.

otlp.py OUT CONTROL [CERTIFICATE KEY [TOKEN]]     control: {"status": "UNAVAILABLE", "forget": true, "delay": 0.1, "partial": 1}
`forget`: what came is written, and the answer is an error all the same."""
import gzip
import http.server
import ssl
import sys
import threading
import time
from concurrent import futures

import grpc
from common import Log, control, ready
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as service

OUT, CONTROL = sys.argv[1:3]
CERTIFICATE = sys.argv[3:5]
TOKEN = sys.argv[5] if len(sys.argv) > 5 else None
METHOD = "opentelemetry.proto.collector.profiles.v1development.ProfilesService"
LOG = Log(OUT)


def text(value):
    return getattr(value, value.WhichOneof("value")) if value.WhichOneof("value") else None


def problems(request):
    """What breaks the rules of profiles.proto."""
    found = []
    tables = request.dictionary
    names = ["mapping", "location", "function", "link", "string", "attribute", "stack"]
    used = {name: {0} for name in names}
    for name in names:
        table = getattr(tables, name + "_table")
        if not table:
            found.append(f"{name}_table is empty")
            continue
        first = table[0]
        if name == "string" and first != "" or name != "string" and first.ByteSize() != 0:
            found.append(f"{name}_table[0] is not the zero value")
        keys = list(table) if name == "string" else [entry.SerializeToString(deterministic=True) for entry in table]
        if len(set(keys)) != len(keys):
            found.append(f"{name}_table has something twice")

    def use(name, index):
        if not 0 <= index < len(getattr(tables, name + "_table")):
            found.append(f"{name} {index} is not there")
        used[name].add(index)
        return index

    for resource in request.resource_profiles:
        keys = [attribute.key for attribute in resource.resource.attributes]
        if len(set(keys)) != len(keys):
            found.append("a resource has an attribute twice")
        for scope in resource.scope_profiles:
            for profile in scope.profiles:
                if len(profile.profile_id) != 16:
                    found.append("profile_id is not 16 bytes")
                use("string", profile.sample_type.type_strindex)
                use("string", profile.sample_type.unit_strindex)
                use("string", profile.period_type.type_strindex)
                use("string", profile.period_type.unit_strindex)
                if not profile.time_unix_nano or not profile.duration_nano:
                    found.append("a profile has no time")
                for sample in profile.samples:
                    if not sample.stack_index:
                        found.append("a sample has no stack")
                    use("stack", sample.stack_index)
                    if len(sample.values) != 1 or sample.timestamps_unix_nano:
                        found.append("a sample has not one value")
                    if sample.link_index:
                        found.append("a sample has a link")
    for stack in tables.stack_table:
        for location in stack.location_indices:
            use("location", location)
    for location in tables.location_table:
        use("mapping", location.mapping_index)
        for line in location.lines:
            use("function", line.function_index)
        for attribute in location.attribute_indices:
            use("attribute", attribute)
    for function in tables.function_table:
        use("string", function.name_strindex)
        use("string", function.filename_strindex)
    for index, mapping in enumerate(tables.mapping_table):
        use("string", mapping.filename_strindex)
        keys = [tables.string_table[tables.attribute_table[use("attribute", a)].key_strindex] for a in mapping.attribute_indices]
        if index and "process.executable.build_id.gnu" not in keys:
            found.append("a mapping has no build id")
    for attribute in tables.attribute_table:
        use("string", attribute.key_strindex)
    for name in names:
        orphans = set(range(len(getattr(tables, name + "_table")))) - used[name]
        if orphans:
            found.append(f"{name}_table has {len(orphans)} entries that nothing uses")
    return found


def samples(request):
    tables = request.dictionary

    def frame(index):
        location = tables.location_table[index]
        line = location.lines[0]
        function = tables.function_table[line.function_index]
        mapping = tables.mapping_table[location.mapping_index]
        attributes = {
            tables.string_table[tables.attribute_table[a].key_strindex]: text(tables.attribute_table[a].value)
            for owner in (location, mapping)
            for a in owner.attribute_indices
        }
        file = tables.string_table[function.filename_strindex] or tables.string_table[mapping.filename_strindex]
        kind = attributes.get("profile.frame.type", "special")
        build_id = attributes.get("process.executable.build_id.gnu")
        return [tables.string_table[function.name_strindex], file, line.line, kind, build_id]

    for resource in request.resource_profiles:
        of = {attribute.key: text(attribute.value) for attribute in resource.resource.attributes}
        for scope in resource.scope_profiles:
            for profile in scope.profiles:
                name = tables.string_table[profile.sample_type.type_strindex]
                for sample in profile.samples:
                    stack = [frame(index) for index in tables.stack_table[sample.stack_index].location_indices]
                    yield {
                        "resource": of,
                        "type": name,
                        "value": sample.values[0],
                        "stack": stack,
                        "time": profile.time_unix_nano,
                        "profile": profile.profile_id.hex(),
                    }


def take(request, size):
    """Returns the status to answer with."""
    wanted = control(CONTROL)
    time.sleep(wanted.get("delay", 0))
    status = wanted.get("status")
    if status is None or wanted.get("forget"):
        LOG.write({"size": size, "problems": problems(request), "samples": list(samples(request))})
    return status, wanted.get("partial", 0)


def answer(partial):
    reply = service.ExportProfilesServiceResponse()
    if partial:
        reply.partial_success.rejected_profiles = partial
        reply.partial_success.error_message = "some of them"
    return reply


def export(request, context):
    if TOKEN and dict(context.invocation_metadata()).get("authorization") != f"Bearer {TOKEN}":
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
    status, partial = take(request, request.ByteSize())
    if status:
        context.abort(getattr(grpc.StatusCode, status), "as the test wants it")
    return answer(partial)


class Http(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/v1development/profiles" or self.headers["content-type"] != "application/x-protobuf":
            return self.reply(404, b"no such signal")
        if TOKEN and self.headers["authorization"] != f"Bearer {TOKEN}":
            return self.reply(401, b"who are you?")
        if self.headers["content-encoding"] == "gzip":
            body = gzip.decompress(body)
        request = service.ExportProfilesServiceRequest.FromString(body)
        status, partial = take(request, len(body))
        codes = {None: 200, "UNAVAILABLE": 503, "INVALID_ARGUMENT": 400, "RESOURCE_EXHAUSTED": 429, "INTERNAL": 500}
        self.reply(codes[status], answer(partial).SerializeToString() if status is None else b"as the test wants it")

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def main():
    handler = grpc.unary_unary_rpc_method_handler(
        export,
        request_deserializer=service.ExportProfilesServiceRequest.FromString,
        response_serializer=service.ExportProfilesServiceResponse.SerializeToString,
    )
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(METHOD, {"Export": handler}),))
    web = http.server.ThreadingHTTPServer(("127.0.0.1", control(CONTROL).get("http_port", 0)), Http)
    if CERTIFICATE:
        pair = tuple(open(path, "rb").read() for path in CERTIFICATE)
        grpc_port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(pair[1], pair[0])]))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*CERTIFICATE)
        web.socket = context.wrap_socket(web.socket, server_side=True)
    else:
        # The same port after a restart.
        grpc_port = server.add_insecure_port(f"127.0.0.1:{control(CONTROL).get('port', 0)}")
    server.start()
    threading.Thread(target=web.serve_forever, daemon=True).start()
    ready(grpc=grpc_port, http=web.server_port)
    server.wait_for_termination()


main()
