"""What `AgentSession` asks of a loaded model: free a conversation's memory, save it, load it."""

from __future__ import annotations

import logging
from pathlib import Path

from dlite_agent.chat.message_keys import seed_key
from dlite_agent.engine.admission import plan_history
from dlite_agent.engine.loading import LoadedModel
from dlite_agent.engine.session_tasks import FreeSessions, LoadConversation, SaveConversation
from dlite_agent.engine.tasks import Count, Later
from dlite_agent.errors import CheckpointError
from dlite_agent.sessions.atomic_file import FolderLock, explained, make_folder, write_file
from dlite_agent.sessions.checkpoint import save_session
from dlite_agent.sessions.disk_journal import journal_text, load_journal
from dlite_agent.sessions.journal import Journal

__all__ = ["free_sessions", "load_conversation", "save_conversation"]

logger = logging.getLogger(__name__)

_JOURNAL = "journal"


def free_sessions(model: LoadedModel, task: FreeSessions) -> int:
    """Give the pages of a conversation's sessions back; returns how many sessions went."""
    memory = model.tenants.of(task.tenant)
    memory.hints.pop(task.hint, None)
    wanted = set(task.session_ids).difference(memory.hints.values())
    freed = [
        info.session_id
        for info in model.sessions.sessions()
        if wanted.intersection((info.session_id, info.sibling_of))
        and info.tenant == task.tenant
        and not info.is_busy
        and not info.is_pinned
    ]
    for session_id in freed:
        model.sessions.discard(model.sessions.get(session_id))
    model.tiers.forget_copies(freed)
    return len(freed)


def save_conversation(model: LoadedModel, task: SaveConversation) -> Later:
    """Begin to write KV, if it is in the pool, and the tokens of the answers.

    It is written as it is now, whatever turns do meanwhile. The answer is the number of KV rows, or
    a `CheckpointError` where the folder cannot be written or somebody else writes it.

    Raises:
        SessionBusyError: A turn runs on the session.
    """
    folder, request = Path(task.folder), task.request
    infos = {info.session_id: info for info in model.sessions.sessions()}
    info = infos.get(task.session_id)
    manifest, snapshot = None, None
    if info is not None and info.tenant == request.tenant:
        manifest, snapshot = model.sessions.get(task.session_id).snapshot()
    memory = model.tenants.of(request.tenant)
    tools = memory.tools.first_seen(request.tools)
    plan = plan_history(
        model, memory, request.messages, seed_key(tools, request.template_kwargs), "as_generated"
    )
    turns = Journal()
    for key in plan.keys:
        for record in reversed(memory.journal.find(key)):
            turns.record(key, record)
    journal = journal_text(turns, model.tokenizer.fingerprint)

    def write() -> Count:
        if manifest is not None and snapshot is not None:
            save_session(folder, manifest, snapshot.rows)
        with explained("save the session to", folder):
            make_folder(folder)
            with FolderLock(folder):
                write_file(folder / _JOURNAL, [journal])
        return Count(snapshot.length if snapshot is not None else 0)

    return model.saves.put(write, snapshot)


def load_conversation(model: LoadedModel, task: LoadConversation) -> int:
    """Let requests find a saved conversation; returns its KV rows.

    Raises:
        CheckpointError: It is damaged, cannot be read, or another model's.
    """
    folder = Path(task.folder)
    memory = model.tenants.of(task.tenant)
    turns = Journal()
    with explained("read the session in", folder):
        if not (folder / _JOURNAL).exists():
            raise CheckpointError(
                f"{str(folder)!r} holds no conversation ({_JOURNAL} is missing); name the folder "
                "that was given to AgentSession.save"
            )
        load_journal(folder / _JOURNAL, turns, model.tokenizer.fingerprint)
    for key, record in turns.records():
        memory.journal.record(key, record)
    return model.tiers.add_folder(folder, model.target, task.tenant)
