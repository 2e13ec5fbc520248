"""A model class for mini-swe-agent: its own LiteLLM model, with `dlite/<model>` registered."""

from __future__ import annotations

from minisweagent.models.litellm_model import LitellmModel

import dlite_agent.integrations.litellm  # noqa: F401  # registers the provider

__all__ = ["DLiteModel"]


class DLiteModel(LitellmModel):
    """`LitellmModel` whose answers cost nothing; cost tracking needs no setting.

    Named in mini-swe-agent's configuration:

    ```yaml
    model:
      model_class: dlite_agent.integrations.mini_swe_agent.DLiteModel
      model_name: dlite/nano
    ```
    """

    def _calculate_cost(self, response: object) -> dict[str, float]:  # noqa: ARG002
        return {"cost": 0.0}
