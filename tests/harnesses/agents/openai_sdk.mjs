// A streamed tool loop on the OpenAI SDK for Node, as its documentation shows it: BASE_URL PROMPT.
import { execSync } from "node:child_process";
import { createRequire } from "node:module";

const require = createRequire(process.env.HARNESS_MODULES + "/");
const OpenAI = require("openai").default;
const [baseURL, prompt] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "key-of-the-harness" });
const parameters = {
  type: "object",
  properties: { command: { type: "string" } },
  required: ["command"],
};
const tool = {
  type: "function",
  function: { name: "bash", description: "Run a command.", parameters },
};
const messages = [{ role: "user", content: prompt }];
for (;;) {
  const stream = client.chat.completions.stream({ model: "test-model", messages, tools: [tool] });
  const reply = (await stream.finalChatCompletion()).choices[0].message;
  messages.push(reply);
  if (!reply.tool_calls?.length) {
    console.log(reply.content);
    break;
  }
  for (const call of reply.tool_calls) {
    const content = execSync(JSON.parse(call.function.arguments).command, { encoding: "utf8" });
    messages.push({ role: "tool", tool_call_id: call.id, content });
  }
}
