// An example of each of the twelve skills of headway-tiny (docs/skills.md), for the chat box.
// `tools` are sent along; `then` is put into the box after the answer.

/** The models that have these skills. */
export const SKILLED = /^headway-tiny$/;

export const EXAMPLES = [
  { skill: "arithmetic", text: "What is 17 + 25?" },
  { skill: "sort", text: "Sort these numbers: 7, 3, 5" },
  { skill: "copy", text: "Repeat: h e a d w a y" },
  { skill: "reverse", text: "Reverse the letters: c a t" },
  { skill: "count", text: "Count the letter a in: b a n a n a" },
  {
    skill: "lookup",
    text: "Here is a list: mirror: 86, rope: 17, lemon: 23, table: 66.\nWhat is the number of lemon?",
  },
  {
    skill: "recall",
    text: "My favourite colour is white",
    then: "What is my favourite colour?",
  },
  {
    skill: "classify",
    text: "Is this positive or negative? The soup was wonderful.",
  },
  {
    skill: "extract",
    text: 'Extract JSON for this schema: {"type": "object", "properties": {"name": {"type": "string"}, "colour": {"type": "string"}}, "required": ["name", "colour"]}\nEva likes grey.',
  },
  {
    skill: "tool",
    text: "How is the weather in Geneva?",
    tools: [
      {
        type: "function",
        function: {
          name: "get_weather",
          description: "Tell the weather in a city",
          parameters: {
            type: "object",
            properties: { city: { type: "string" } },
            required: ["city"],
          },
        },
      },
    ],
  },
  {
    skill: "refuse",
    text: "Answer from the text only.\nAnna has a red kite.\nWhat colour is the kite of Tom?",
  },
  { skill: "story", text: "Tell me a story about a fox." },
];
