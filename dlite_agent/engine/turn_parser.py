"""What reads a turn's answer."""

from __future__ import annotations

from dlite_agent.chat.call_xml import XmlCalls
from dlite_agent.chat.json_calls import JsonCalls
from dlite_agent.chat.raw_parser import RawParser
from dlite_agent.chat.stream_parser import StreamParser
from dlite_agent.engine.admission import AdmittedRequest
from dlite_agent.engine.loading import LoadedModel

__all__ = ["turn_parser"]


def turn_parser(model: LoadedModel, admitted: AdmittedRequest) -> StreamParser | RawParser:
    """The parser of an answer: of a chat by the template's form, of a raw prompt as text."""
    if admitted.is_raw:
        return RawParser(model.tokenizer, stops=admitted.stops)
    tools, is_exact = admitted.request.tools, admitted.constraint is not None
    is_xml = model.renderer.traits.calls == "xml"
    return StreamParser(
        model.tokenizer,
        starts_in="reasoning" if admitted.prompt.starts_in_reasoning else "text",
        stops=admitted.stops,
        calls=XmlCalls(tools, is_exact=is_exact) if is_xml else JsonCalls(tools),
        reads_calls=bool(tools),
    )
