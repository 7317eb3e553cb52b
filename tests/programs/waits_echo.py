"""An asyncio server that sends back what it is sent, and has little to do. Its port is in its first line."""
import asyncio

import handshake


async def echo(reader, writer):
    while data := await reader.read(100):
        writer.write(data)
        await writer.drain()


async def main():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    handshake.ready(port=server.sockets[0].getsockname()[1])
    await server.serve_forever()


asyncio.run(main())
