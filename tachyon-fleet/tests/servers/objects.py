"""What an object store holds, by the cloud's own client: a JSON object of keys and digests. objects.py s3|azure ENDPOINT ID KEY BUCKET [make]"""
import hashlib
import json
import sys

kind, endpoint, identity, key, bucket = sys.argv[1:6]
if kind == "s3":
    import boto3

    client = boto3.client(
        "s3", endpoint_url=endpoint, region_name="garage", aws_access_key_id=identity, aws_secret_access_key=key
    )
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    names = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    read = lambda name: client.get_object(Bucket=bucket, Key=name)["Body"].read()
else:
    from azure.storage.blob import BlobServiceClient

    service = BlobServiceClient(endpoint, credential={"account_name": identity, "account_key": key})
    client = service.get_container_client(bucket)
    if sys.argv[6:]:
        client.create_container()
    names = [blob.name for blob in client.list_blobs()]
    read = lambda name: client.download_blob(name).readall()
print(json.dumps({name: hashlib.sha256(read(name)).hexdigest() for name in names}))
