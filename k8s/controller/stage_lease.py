"""The Lease of a stage, which the process of one deploy Job holds and renews while it works.

As in client-go, a holder is taken for alive while the Lease changes, measured by the reader's own monotonic clock. The
times in the Lease come from another machine's clock and are for people only.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from k8s.objects.api import Api, Conflict, Object
from k8s.objects.names import STAGE_LABEL, lease_name

LEASE_SECONDS = 30


class LeaseHeld(Exception):
    """Another process holds the Lease of the stage, or took it over."""


class StageLease:
    """The Lease of one stage as one holder uses it."""

    def __init__(self, api: Api, stage: str, holder: str) -> None:
        self._api, self._stage, self._holder = api, stage, holder
        self._seen: tuple[str, float] = ("", 0.0)  # another holder's version, and when it was first seen

    def hold(self) -> None:
        """Take or renew the Lease.

        Raises `LeaseHeld` until another holder has not renewed it for its whole duration, from the time when this
        process first saw that holder's last version.
        """
        lease = self._api.find("Lease", lease_name(self._stage))
        try:
            if lease is None:
                self._api.create(self._body({}))
                return
            holder = lease["spec"].get("holderIdentity")
            if holder not in (None, "", self._holder) and not self._is_expired(lease):
                raise LeaseHeld(f"{holder} holds the lease of {self._stage}")
            self._api.replace(self._body(lease))
        except Conflict as error:
            raise LeaseHeld(str(error)) from error

    def release(self) -> None:
        lease = self._api.find("Lease", lease_name(self._stage))
        if lease and lease["spec"].get("holderIdentity") == self._holder:
            self._api.delete("Lease", lease_name(self._stage), uid=lease["metadata"]["uid"])

    def _is_expired(self, lease: Object) -> bool:
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = (version, time.monotonic())
        seconds = lease["spec"].get("leaseDurationSeconds") or LEASE_SECONDS
        return time.monotonic() - self._seen[1] > seconds

    def _body(self, lease: Object) -> Object:
        metadata: dict[str, Any] = {"name": lease_name(self._stage), "labels": {STAGE_LABEL: self._stage}}
        if lease:
            metadata["resourceVersion"] = lease["metadata"]["resourceVersion"]
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": self._holder,
                "leaseDurationSeconds": LEASE_SECONDS,
                "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            },
        }
