"""A DNS server for the names of the cluster's services: python name_server.py ADDRESS CERTIFICATES API_SERVER_PORT."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import sys
import urllib.request
from pathlib import Path
from typing import Any

_SUFFIX = "svc.cluster.local"
_NO_ERROR, _NO_NAME = 0, 3
_ADDRESS = 1  # the type of a question for IPv4 addresses


class NameServer(asyncio.DatagramProtocol):
    """Answers questions for IPv4 addresses of `names`."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        labels, place = [], 12
        while length := data[place]:
            labels.append(data[place + 1 : place + 1 + length].decode())
            place += 1 + length
        kind = struct.unpack(">H", data[place + 1 : place + 3])[0]
        known = self.names.get(".".join(labels).lower())
        found = known if known and kind == _ADDRESS else []
        flags = 0x8580 | (_NO_NAME if known is None else _NO_ERROR)
        head = data[:2] + struct.pack(">5H", flags, 1, len(found), 0, 0)
        # The name of an answer is a pointer to the question. It is valid for one second.
        answers = [struct.pack(">HHHIH", 0xC00C, _ADDRESS, 1, 1, 4) + socket.inet_aton(each) for each in found]
        self._transport.sendto(head + data[12 : place + 5] + b"".join(answers), address)


class Cluster:
    """The services and endpoints of the API server."""

    def __init__(self, certificates: Path, port: str) -> None:
        self._url = f"https://127.0.0.1:{port}"
        self._tls = ssl.create_default_context(cafile=certificates / "ca.crt")
        self._tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
        self._tls.load_cert_chain(certificates / "admin.crt", certificates / "admin.key")

    def _list(self, path: str) -> list[dict[str, Any]]:
        with urllib.request.urlopen(self._url + path, context=self._tls, timeout=5) as answer:
            return json.load(answer)["items"]

    def names(self) -> dict[str, list[str]]:
        """Return the addresses of each service: its own, or those of its ready pods if it is headless."""
        names: dict[str, list[str]] = {}
        for service in self._list("/api/v1/services"):
            address = service["spec"]["clusterIP"]
            names[_name(service, service["metadata"]["name"])] = [] if address == "None" else [address]
        for found in self._list("/apis/discovery.k8s.io/v1/endpointslices"):
            name = _name(found, found["metadata"].get("labels", {}).get("kubernetes.io/service-name", ""))
            if not names.get(name, ["unknown"]):
                ready = [each for each in found["endpoints"] or [] if each["conditions"].get("ready")]
                names[name] = [address for each in ready for address in each["addresses"]]
        return names


def _name(found: dict[str, Any], service: str) -> str:
    return f"{service}.{found['metadata']['namespace']}.{_SUFFIX}"


async def main(address: str, certificates: str, port: str) -> None:
    """Answer until cancelled. The names are read every second."""
    loop = asyncio.get_running_loop()
    _transport, server = await loop.create_datagram_endpoint(NameServer, local_addr=(address, 53))
    cluster = Cluster(Path(certificates), port)
    while True:
        try:
            server.names = await asyncio.to_thread(cluster.names)
        except OSError as error:
            print(f"name server: {error}", flush=True)
        await asyncio.sleep(1)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
