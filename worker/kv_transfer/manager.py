"""The manager of one rank's disaggregation: its memory, transfer engine, mailbox, and prefill or decode side."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from enum import Enum

from worker.kv_transfer.bootstrap_client import BootstrapClient, Registrar
from worker.kv_transfer.channel import Channel
from worker.kv_transfer.decode import DecodeSide
from worker.kv_transfer.frames import (
    AnyMessage,
    Done,
    Failure,
    FrameCodec,
    Hello,
    Refusal,
    RoomRequest,
    Welcome,
)
from worker.kv_transfer.layout import KVArgs, layout_of
from worker.kv_transfer.local import LiveRooms, LocalRank
from worker.kv_transfer.prefill import PrefillSide
from worker.kv_transfer.ranks import Rank, Topology
from worker.kv_transfer.registry import Registration
from worker.kv_transfer.rooms import check_timeout
from worker.kv_transfer.transfer import TransferEngine


class DisaggregationMode(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationSettings:
    """Addresses, credentials and timeouts of a rank; times in seconds.

    - `host`: the address on which this rank listens and to which peers connect.
    - `bootstrap_addr`: the service of a prefill rank's registration, `host:port`.
    - `secret`: the key that signs frames, equal on every rank.
    - `heartbeat_s`: the interval of heartbeats; a peer is lost after two missed ones.
    """

    host: str = "127.0.0.1"
    port: int = 0
    bootstrap_addr: str = ""
    bootstrap_token: str = ""
    secret: str = ""
    room_timeout_s: float = 300.0
    heartbeat_s: float = 5.0
    connect_timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """The current rooms and pages of a rank, and its dropped frames since the start."""

    rooms: int
    peers: int
    waiting_requests: int  # prefill: rooms that decode requested and the engine has not begun
    quarantined_rooms: int
    quarantined_pages: int
    rejected_frames: dict[str, int]  # malformed, oversized, unsigned, misdirected
    errors: int


class KVManager:
    """The disaggregation of one rank, from which KVSender (prefill) or KVReceiver (decode) are created.

    It registers the memory of `args` with `engine`, which the caller closes after the manager. A prefill rank registers
    with its bootstrap service in the background. Raises ValueError, which names the field, for contradicting arguments,
    and OSError for an address in use.
    """

    def __init__(
        self,
        args: KVArgs,
        mode: DisaggregationMode,
        engine: TransferEngine,
        settings: DisaggregationSettings | None = None,
        topology: Topology | None = None,
        rank: Rank | None = None,
    ) -> None:
        settings = settings or DisaggregationSettings()
        topology, rank = topology or Topology(), rank or Rank()
        for name, size, number in zip(Topology._fields, topology, rank, strict=True):
            if not 0 <= number < size:
                raise ValueError(f"rank.{name} {number} does not exist: topology.{name} is {size}")
        if settings.host in ("", "*", "0.0.0.0", "::"):
            raise ValueError(f"host {settings.host!r}: give one address of this machine, to which peers connect")
        check_timeout(settings.room_timeout_s, "room_timeout_s")
        layout = layout_of(args, topology, rank)
        client = None
        if mode is DisaggregationMode.PREFILL:
            client = BootstrapClient(settings.bootstrap_addr, settings.bootstrap_token)
        engine.register(layout.regions())

        self.mode = mode
        self.instance = secrets.token_hex(8)
        self._channel = Channel(
            settings.host,
            settings.port,
            FrameCodec(settings.secret),
            self._on_message,
            self._on_lost,
            heartbeat_s=settings.heartbeat_s,
            connect_timeout_s=settings.connect_timeout_s,
        )
        self.endpoint = self._channel.endpoint
        self.local = LocalRank(
            self.instance, topology, rank, layout, engine, self._channel, settings.room_timeout_s, LiveRooms()
        )
        self._prefill = PrefillSide(self.local) if mode is DisaggregationMode.PREFILL else None
        self._decode = DecodeSide(self.local, settings.bootstrap_token) if mode is DisaggregationMode.DECODE else None
        self._channel.start()
        self._registrar: Registrar | None = None
        self._closed = threading.Lock()
        if client is not None:
            registration = Registration(
                topology,
                rank,
                settings.host,
                self._channel.port,
                args.page_size,
                args.kv_cache_dtype,
                args.kv_layout,
                self.instance,
                settings.heartbeat_s,
            )
            self._registrar = Registrar(client, registration, settings.heartbeat_s)

    @property
    def prefill(self) -> PrefillSide:
        """The prefill side. Raises ValueError on a decode rank."""
        if self._prefill is None:
            raise ValueError("a KVSender needs the manager of a prefill rank: mode=DisaggregationMode.PREFILL")
        return self._prefill

    @property
    def decode(self) -> DecodeSide:
        """The decode side. Raises ValueError on a prefill rank."""
        if self._decode is None:
            raise ValueError("a KVReceiver needs the manager of a decode rank: mode=DisaggregationMode.DECODE")
        return self._decode

    def wait_registered(self, timeout: float) -> bool:
        """Return whether this prefill rank is registered with its bootstrap service, within `timeout` seconds."""
        return self._registrar is not None and self._registrar.registered.wait(timeout)

    def stats(self) -> ManagerStats:
        quarantine = self._decode.quarantine if self._decode else None
        return ManagerStats(
            rooms=len(self.local.rooms),
            peers=self._prefill.peers if self._prefill else self.decode.peers,
            waiting_requests=self._prefill.waiting_requests if self._prefill else 0,
            quarantined_rooms=quarantine.rooms if quarantine else 0,
            quarantined_pages=quarantine.pages if quarantine else 0,
            rejected_frames=dict(self._channel.rejected),
            errors=self._channel.errors,
        )

    def close(self) -> None:
        """Fail every room, notify the peers, and end every thread within a few seconds.

        Repeated calls have no effect.
        """
        if not self._closed.acquire(blocking=False):
            return
        self.local.rooms.close()
        if self._registrar is not None:
            self._registrar.close()
        side = self._prefill or self.decode
        self._channel.close(last=side.close)
        side.join()

    def _on_message(self, message: AnyMessage) -> None:
        if message.to != self.instance:
            self._misdirected(message)
        elif self._prefill is not None:
            self._to_prefill(self._prefill, message)
        elif self._decode is not None:
            self._to_decode(self._decode, message)

    def _to_prefill(self, side: PrefillSide, message: AnyMessage) -> None:
        match message:
            case Hello():
                side.on_hello(message)
            case RoomRequest():
                side.on_room(message)
            case Failure():
                side.on_failure(message)
            case _:
                self._channel.rejected["misdirected"] += 1

    def _to_decode(self, side: DecodeSide, message: AnyMessage) -> None:
        match message:
            case Welcome():
                side.on_welcome(message)
            case Refusal():
                side.on_refusal(message)
            case Done():
                side.on_done(message)
            case Failure():
                side.on_failure(message)
            case _:
                self._channel.rejected["misdirected"] += 1

    def _misdirected(self, message: AnyMessage) -> None:
        """Count a frame for a previous instance at this address, and report to the sender that the instance ended."""
        self._channel.rejected["misdirected"] += 1
        if isinstance(message, Hello | RoomRequest):
            reason = f"instance {message.to} ended, {self.instance} listens at {self.endpoint}"
            refusal = Refusal(sender=self.instance, to=message.sender, about=message.to, reason=reason)
            self._channel.send(message.reply_to, refusal)

    def _on_lost(self, endpoint: str, reason: str) -> None:
        (self._prefill or self.decode).on_lost(endpoint, reason)
