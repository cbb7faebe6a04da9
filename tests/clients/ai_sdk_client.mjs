// `@ai-sdk/openai-compatible` against a gateway: node ai_sdk_client.mjs BASE_URL MODEL [--auto].
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The packages lie in build/clients-node; a module of this folder would look for them beside itself.
const found = createRequire(`${process.env.NODE_PATH}/`);
const load = (name) => import(pathToFileURL(found.resolve(name)).href);
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { generateObject, generateText, stepCountIs, streamText, tool } = await load("ai");
const { z } = await load("zod");

const [baseURL, name, ...flags] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "octavo", baseURL, apiKey: "any", supportsStructuredOutputs: true });
const model = provider(name);
const prompt = "How is the weather in Paris?";
const weather = tool({
  description: "Tells the weather.",
  inputSchema: z.object({ city: z.string().max(20) }),
  execute: async ({ city }) => `It rains in ${city}.`,
});

const checks = {
  async words() {
    const { text, usage } = await generateText({ model, prompt, maxOutputTokens: 16, maxRetries: 0 });
    assert(text.length > 0);
    assert(usage.outputTokens <= 16);
  },
  async words_streamed() {
    const options = { model, prompt, maxOutputTokens: 16, temperature: 0, maxRetries: 0 };
    let text = "";
    for await (const piece of streamText(options).textStream) text += piece;
    assert.equal(text, (await generateText(options)).text);
  },
  async tool_that_must_be_called() {
    const { toolCalls, toolResults } = await generateText({
      model, prompt, tools: { weather }, toolChoice: "required", maxRetries: 0,
    });
    assert.equal(toolCalls[0].toolName, "weather");
    assert(toolResults[0].output.startsWith("It rains in "));
  },
  async tool_streamed() {
    const result = streamText({ model, prompt, tools: { weather }, toolChoice: "required", maxRetries: 0 });
    const calls = await result.toolCalls;
    assert.equal(typeof calls[0].input.city, "string");
  },
  async object_by_schema() {
    const schema = z.object({ city: z.string().max(20), celsius: z.number().int().min(-90).max(60) });
    const { object } = await generateObject({ model, prompt, schema, maxRetries: 0 });
    assert.equal(typeof object.celsius, "number");
  },
};
if (flags.includes("--auto")) {
  checks.tool_and_back = async () => {
    const { text, steps } = await generateText({
      model, prompt, tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0,
    });
    assert.equal(steps.length, 2);
    assert(text.length > 0);
  };
}

let failed = 0;
for (const [check, run] of Object.entries(checks)) {
  try {
    await run();
    console.log(`ok      ${check}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED  ${check}\n${error.stack}\n${JSON.stringify(error.responseBody ?? error.text ?? "")}`);
  }
}
const count = Object.keys(checks).length;
console.log(`ai-sdk: ${count - failed} of ${count} work`);
process.exit(failed ? 1 : 0);
