"""What `ChatDLite` can do, as LangChain's middleware asks for it."""

from __future__ import annotations

from langchain_core.language_models import ModelProfile

__all__ = ["model_profile"]


def model_profile(max_context: int | None, max_tokens: int | None) -> ModelProfile:
    """The profile of a model.

    Args:
        max_context: Most tokens of prompt and answer together; None where that is not known yet.
        max_tokens: Those of them that are kept for the answer; None keeps one.
    """
    profile = ModelProfile(
        open_weights=True,
        text_inputs=True,
        text_outputs=True,
        image_inputs=False,
        image_url_inputs=False,
        image_tool_message=False,
        pdf_inputs=False,
        pdf_tool_message=False,
        audio_inputs=False,
        video_inputs=False,
        tool_calling=True,
        tool_call_streaming=True,
        tool_choice=True,
        structured_output=True,
        reasoning_output=True,
        temperature=True,
    )
    if max_context is not None:
        profile["max_input_tokens"] = max(0, max_context - (max_tokens or 1))
        profile["max_output_tokens"] = min(max_context, max_tokens or max_context)
    return profile
