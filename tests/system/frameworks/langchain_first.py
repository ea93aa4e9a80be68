"""LangChain's quickstart: an agent with one tool, and a structured answer in its two ways."""

from typing import Any

from given import Person, questions, report
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

called: list[str] = []


def get_weather(city: str) -> str:
    """Get weather for a given city."""
    called.append(city)
    return f"It's always sunny in {city}!"


given = questions()
model = ChatOpenAI(model="headway-tiny", base_url=f"{given.url}/v1", api_key="none", temperature=0)
agent: Any = create_agent(
    model=model, tools=[get_weather], system_prompt="You are a helpful assistant"
)
said = []
for question in given.weather:
    state = agent.invoke({"messages": [{"role": "user", "content": question}]})
    said.append(state["messages"][-1].content)
ways = [model.with_structured_output(Person, method=m) for m in ("json_schema", "function_calling")]
records = [[way.invoke(text).model_dump() for text in given.people] for way in ways]
report(called, said, records)
