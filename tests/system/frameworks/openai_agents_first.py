"""openai-agents' first examples by chat and by responses: one tool, and an `output_type`."""

import asyncio

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from given import Person, questions, report
from openai import AsyncOpenAI

called: list[str] = []
given = questions()
set_tracing_disabled(True)


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    called.append(city)
    return f"The weather in {city} is sunny"


async def ask(model: Model) -> tuple[list[str], list[dict]]:
    """What the agent with the tool says, and what that with a type returns."""
    told = {
        "instructions": "You are a helpful agent.",
        "model": model,
        "model_settings": ModelSettings(temperature=0),
    }
    helper = Agent(name="Assistant", tools=[get_weather], **told)
    reader = Agent(name="Reader", output_type=Person, **told)
    said = [(await Runner.run(helper, text)).final_output for text in given.weather]
    records = [(await Runner.run(reader, text)).final_output for text in given.people]
    return said, [record.model_dump() for record in records]


async def main() -> None:
    """Both of its models, one after the other; the tool is called by each."""
    client = AsyncOpenAI(base_url=f"{given.url}/v1", api_key="none")
    kinds = (OpenAIChatCompletionsModel, OpenAIResponsesModel)
    answers = [await ask(kind(model="headway-tiny", openai_client=client)) for kind in kinds]
    report(called, [text for said, _ in answers for text in said], [r for _, r in answers])


asyncio.run(main())
