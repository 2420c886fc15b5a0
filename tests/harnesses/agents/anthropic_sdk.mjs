// A streamed tool loop on the Anthropic SDK for Node, as its documentation shows it: BASE_URL PROMPT.
import { execSync } from "node:child_process";
import { createRequire } from "node:module";

const require = createRequire(process.env.HARNESS_MODULES + "/");
const Anthropic = require("@anthropic-ai/sdk").default;
const [baseURL, prompt] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey: "key-of-the-harness" });
const input_schema = {
  type: "object",
  properties: { command: { type: "string" } },
  required: ["command"],
};
const tools = [{ name: "bash", description: "Run a command.", input_schema }];
const messages = [{ role: "user", content: prompt }];
for (;;) {
  const stream = client.messages.stream({
    model: "test-model",
    max_tokens: 1000,
    messages,
    tools,
  });
  const reply = await stream.finalMessage();
  messages.push({ role: "assistant", content: reply.content });
  const calls = reply.content.filter((block) => block.type === "tool_use");
  if (!calls.length) {
    console.log(reply.content.map((block) => block.text).join(""));
    break;
  }
  const content = calls.map((call) => ({
    type: "tool_result",
    tool_use_id: call.id,
    content: execSync(call.input.command, { encoding: "utf8" }),
  }));
  messages.push({ role: "user", content });
}
