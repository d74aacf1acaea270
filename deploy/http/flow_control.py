"""Flow control of a connection: uvicorn's, with an event only for those who wait."""

import asyncio


class FlowControl:
    """Pauses of reading and writing."""

    __slots__ = ("_transport", "_writable", "read_paused", "write_paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._writable: asyncio.Event | None = None
        """exists once a writer has waited"""
        self.read_paused = self.write_paused = False

    async def drain(self) -> None:
        """Wait until writing is no longer paused."""
        if self._writable is None:
            self._writable = asyncio.Event()
        if self.write_paused:
            self._writable.clear()
            await self._writable.wait()

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()
