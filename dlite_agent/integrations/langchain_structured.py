"""`with_structured_output`: what is bound to the model, and what reads its answer."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Literal, get_args

from langchain_core.language_models import LanguageModelInput
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from dlite_agent.errors import UnsupportedParameterError

__all__ = ["StructuredMethod", "bound_options", "structured_parser", "with_raw"]

StructuredMethod = Literal["json_schema", "function_calling", "json_mode"]
Schema = dict[str, Any] | type


def bound_options(
    schema: Schema, method: StructuredMethod, *, strict: bool | None
) -> dict[str, Any]:
    """The options of a call whose answer fits a schema.

    All three methods are constrained by the whole schema; they differ in where the answer stands.

    Args:
        schema: A pydantic or `TypedDict` class, a JSON schema, or an OpenAI function.
        method: `"json_schema"` and `"json_mode"` write the content, `"function_calling"` a call.
        strict: False leaves out keywords that cannot be enforced; they are an error otherwise.

    Raises:
        UnsupportedParameterError: The method is another.
    """
    if method not in get_args(StructuredMethod):
        raise UnsupportedParameterError(
            f"method={method!r} is not known; use one of {', '.join(get_args(StructuredMethod))}"
        )
    json_schema = convert_to_json_schema(schema)
    traced = {"kwargs": {"method": method, "strict": strict}, "schema": json_schema}
    options: dict[str, Any] = {"ls_structured_output_format": traced}
    whole = _without_properties(schema)
    if method == "function_calling":
        tool = convert_to_openai_tool(schema, strict=strict if whole is None else None)
        if whole is not None:
            tool["function"]["parameters"] = whole
        tool["function"].setdefault("strict", strict is not False)
        choice = {"type": "function", "function": {"name": tool["function"]["name"]}}
        return {**options, "tools": [tool], "tool_choice": choice, "closes_calls": True}
    described = {
        "name": json_schema.get("title", "answer"),
        "schema": json_schema if whole is None else whole,
        "strict": strict is not False,
    }
    return {**options, "response_format": {"type": "json_schema", "json_schema": described}}


def _without_properties(schema: Schema) -> dict[str, Any] | None:
    """A JSON schema that says with other words what fits; LangChain's conversion drops those."""
    names = {"name", "function", "toolSpec", "properties"}
    if not isinstance(schema, dict) or "title" not in schema or names & schema.keys():
        return None
    return {key: value for key, value in schema.items() if key not in ("title", "description")}


def structured_parser(schema: Schema, method: StructuredMethod) -> Runnable[Any, Any]:
    """What turns the answer into an object of a pydantic class, else into a dict."""
    model = schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
    if method == "function_calling":
        if model is not None:
            return PydanticToolsParser(tools=[model], first_tool_only=True)
        name = convert_to_openai_tool(schema)["function"]["name"]
        return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    if model is not None:
        return PydanticOutputParser(pydantic_object=model)
    return JsonOutputParser()


def with_raw(
    model: Runnable[LanguageModelInput, Any], parser: Runnable[Any, Any]
) -> Runnable[LanguageModelInput, Mapping[str, Any]]:
    """The message under `raw`, and what was read from it, or why that failed."""
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    read = parsed.with_fallbacks([failed], exception_key="parsing_error")
    return RunnableMap(raw=model) | read
