"""Serve a GGUF file with llama.cpp's own server, as the package xllamacpp has it, until asked to end.

python serve_llama_cpp.py FILE NAME PORT
"""

from __future__ import annotations

import signal
import sys

import xllamacpp


def main(file: str, name: str, port: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.model_alias = [name]
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_ctx = 16384
    params.n_parallel = 4
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
