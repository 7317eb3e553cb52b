"""S3 by moto, with a bucket. s3.py OUT CONTROL      It forgets everything when it ends."""
import logging
import threading

import boto3
from common import ready
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
port = server._server.server_port
client = boto3.client(
    "s3",
    endpoint_url=f"http://127.0.0.1:{port}",
    region_name="us-east-1",
    aws_access_key_id="id",
    aws_secret_access_key="key",
)
client.create_bucket(Bucket="lake")
ready(http=port)
threading.Event().wait()
