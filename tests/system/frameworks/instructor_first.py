"""instructor: `response_model=`, in its four modes; the tool of its example is such a model too."""

import instructor
from given import Person, questions, report
from openai import OpenAI
from pydantic import BaseModel

MODES = (
    instructor.Mode.TOOLS,
    instructor.Mode.JSON,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.MD_JSON,
)


class GetWeather(BaseModel):
    """Get the weather in a city."""

    city: str


given = questions()


def ask(mode: instructor.Mode, text: str, model: type[BaseModel]) -> BaseModel:
    """One answer as an object of `model`, without a second try."""
    client = instructor.from_openai(OpenAI(base_url=f"{given.url}/v1", api_key="none"), mode=mode)
    return client.chat.completions.create(
        model="headway-tiny",
        response_model=model,
        temperature=0,
        max_retries=0,
        messages=[{"role": "user", "content": text}],
    )


called = [ask(instructor.Mode.TOOLS, text, GetWeather).city for text in given.weather]
records = [
    [ask(mode, f"Extract: {text}", Person).model_dump() for text in given.people] for mode in MODES
]
report(called, None, records)
