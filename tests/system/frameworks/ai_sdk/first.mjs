// The AI SDK's first examples: generateText with one tool, generateObject and Output.object.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, Output, stepCountIs, tool } from 'ai';
import { z } from 'zod';

const given = JSON.parse(process.argv[2]);
const provider = createOpenAICompatible({
  name: 'headway',
  baseURL: `${given.url}/v1`,
  apiKey: 'none',
  supportsStructuredOutputs: true,
});
const model = provider('headway-tiny');
const settings = { model, temperature: 0, maxRetries: 0 };
const called = [];
const getWeather = tool({
  description: 'Get the weather in a location',
  inputSchema: z.object({
    location: z.string().describe('The location to get the weather for'),
  }),
  execute: async ({ location }) => {
    called.push(location);
    return `It is sunny in ${location}, 20 degrees.`;
  },
});

const said = [];
for (const prompt of given.weather) {
  const tools = { get_weather: getWeather };
  const { text } = await generateText({ ...settings, tools, stopWhen: stepCountIs(5), prompt });
  said.push(text);
}
const schema = z.object({ name: z.string(), age: z.number().int() });
const objects = [];
const outputs = [];
for (const prompt of given.people) {
  objects.push((await generateObject({ ...settings, schema, prompt })).object);
  const output = Output.object({ schema });
  outputs.push((await generateText({ ...settings, output, prompt })).output);
}
console.log(JSON.stringify({ called, said, records: [objects, outputs] }));
