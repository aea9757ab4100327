"""What follows a trajectory's last step: it is scored, and its bytes go to the trainer's store.

Invariant: a trajectory that is lost here is not kept there either; whatever fails costs one trajectory, under a reason.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from actors.env.episode import Episode, Lost
from actors.env.messages import Outcome
from actors.env.peers import Hands, Peers
from actors.reward.messages import Score, Scored
from actors.trainer.messages import Discard, Discarded, Store, Stored
from bus.message import BusError, DeadlineExceeded, RemoteError

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 30.0
DISCARD_TIMEOUT_S = 60.0
DISCARD_RETRIES = 10


class Settling:
    """See the module docstring. ``check`` raises ``Lost`` where a trajectory can no longer be trained on."""

    def __init__(
        self, hands: Hands, peers: Peers, *, reward_timeout_s: float, check: Callable[[Episode], None]
    ) -> None:
        self._hands = hands
        self._peers = peers
        self._reward_timeout_s = reward_timeout_s
        self._check = check

    async def settle(self, episode: Episode) -> Outcome:
        """Raises ``Lost``."""
        episode.state = "reward"
        reward = await self._score(episode)
        episode.state = "store"
        self._check(episode)
        ticket, node = episode.ticket.id, self._hands.node
        try:
            store, about = Store(episode.finish(reward), episode.metrics), f"trajectory {ticket}"
            await self._peers.store.ask(node, store, Stored, timeout_s=STORE_TIMEOUT_S, retries=3, about=about)
        except (BusError, OSError) as error:
            node.background(self._discard(ticket))  # it may have arrived all the same
            raise Lost("store_failed", str(error)) from None
        return episode.outcome("stored", reward)

    async def _discard(self, ticket: str) -> None:
        node, order = self._hands.node, Discard([ticket])
        try:
            await self._peers.store.ask(node, order, Discarded, timeout_s=DISCARD_TIMEOUT_S, retries=DISCARD_RETRIES)
        except BusError as error:  # it takes up room there until the run is resumed
            log.info("trajectory %s was not discarded: %s", ticket, error)

    async def _score(self, episode: Episode) -> float:
        message = Score(episode.finish())
        about = f"trajectory {episode.ticket.id}"
        try:
            scored = await self._peers.reward.ask(
                self._hands.node, message, Scored, timeout_s=self._reward_timeout_s, retries=3, about=about
            )
        except DeadlineExceeded as error:
            raise Lost("reward_timeout", str(error)) from None
        except RemoteError as error:
            raise Lost("reward_failed", error.remote_message) from None
        except BusError as error:
            raise Lost("reward_failed", str(error)) from None
        if not math.isfinite(scored.reward):
            raise Lost("reward_failed", f"{about} scored {scored.reward}: expected a finite number")
        return scored.reward
