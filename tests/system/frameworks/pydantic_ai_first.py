"""pydantic-ai's first examples: an agent with one tool, and an `output_type` in its three ways."""

from given import Person, questions, report
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

called: list[str] = []
given = questions()
model = OpenAIChatModel(
    "headway-tiny",
    provider=OpenAIProvider(base_url=f"{given.url}/v1", api_key="none"),
    settings={"temperature": 0},
)
agent = Agent(model, instructions="Be concise, reply with one sentence.", retries=0)


@agent.tool_plain
def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: The name of the city.
    """
    called.append(city)
    return f"It is sunny in {city}, 20 degrees."


said = [agent.run_sync(question).output for question in given.weather]
ways = [
    Agent(model, output_type=way(Person), retries=0)
    for way in (ToolOutput, NativeOutput, PromptedOutput)
]
records = [[way.run_sync(text).output.model_dump() for text in given.people] for way in ways]
report(called, said, records)
