"""LlamaIndex's starter example: a FunctionAgent with one tool, and a structured LLM in two ways."""

import asyncio

from given import Person, questions, report
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

called: list[str] = []


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    called.append(city)
    return f"It is sunny in {city}, 20 degrees."


given = questions()


def model(structured: bool) -> OpenAILike:
    """A chat model that calls functions; `structured` sends response_format instead of a tool."""
    return OpenAILike(
        model="headway-tiny",
        api_base=f"{given.url}/v1",
        api_key="none",
        temperature=0,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=structured,
    )


async def ask() -> list[str]:
    """Each question by an agent of its own."""
    said = []
    for question in given.weather:
        agent = FunctionAgent(
            tools=[get_weather],
            llm=model(structured=False),
            system_prompt="You are a helpful assistant.",
        )
        said.append(str(await agent.run(question)))
    return said


said = asyncio.run(ask())
records = [
    [model(way).as_structured_llm(Person).complete(text).raw.model_dump() for text in given.people]
    for way in (False, True)
]
report(called, said, records)
