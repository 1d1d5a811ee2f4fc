/**
 * A harness that echoes a tool call with its arguments spelt otherwise, and prints how each history
 * was taken: the one rule for arguments is the server's, whatever language a harness is written in.
 *
 *     node dist/clients/typescript/examples/echo.js --gateway 127.0.0.1:7435 \
 *       --cases '[{"attempt": "r1", "variant": "{}"}]'
 *
 * Each case is an attempt whose model answers the first request with one tool call. If its variant
 * is null, arguments are read and written again as JavaScript does: numbers pass through doubles.
 */

import { parseArgs } from "node:util";

import type { JsonObject } from "@bufbuild/protobuf";

import { CompletionApi, GatewayClient, openChannel } from "../src/index.js";

const GO = { role: "user", content: "go" };

interface Case {
  readonly attempt: string;
  readonly variant: string | null;
}

interface ToolCall extends JsonObject {
  id: string;
  type: string;
  function: { name: string; arguments: string };
}

interface Answer extends JsonObject {
  role: string;
  content: string | null;
  tool_calls: ToolCall[];
}

/** How a history was taken. */
interface Taken {
  readonly isContinuation: boolean;
  readonly reason: string;
  readonly difference: number | null;
}

/** Read the message of a Chat Completions response. */
function read(bytes: Uint8Array): Answer {
  const response = JSON.parse(new TextDecoder().decode(bytes)) as {
    choices: { message: Answer }[];
  };
  const message = response.choices[0]?.message;
  if (message === undefined) throw new Error("the response has no choice");
  return message;
}

/** Have a call made, echo it, and give how the second request's history was taken. */
async function echo(gateway: GatewayClient, { attempt, variant }: Case): Promise<Taken> {
  const ask = async (messages: JsonObject[]) =>
    gateway.complete(attempt, { model: "any", messages }, CompletionApi.CHAT);
  const message = read((await ask([GO])).response);
  const [call] = message.tool_calls;
  if (call === undefined) throw new Error("the answer has no tool call");
  const spelt = variant ?? JSON.stringify(JSON.parse(call.function.arguments));
  const said = {
    ...message,
    tool_calls: [{ ...call, function: { ...call.function, arguments: spelt } }],
  };
  const result = { role: "tool", tool_call_id: call.id, content: "done" };
  const { context } = await ask([GO, said, result]);
  if (context === undefined) throw new Error("the gateway is not of forest mode");
  const { isContinuation, reason, difference } = context;
  return { isContinuation, reason, difference: difference?.kind ?? null };
}

async function main(): Promise<void> {
  const { values } = parseArgs({
    options: {
      gateway: { type: "string", default: "127.0.0.1:7435" },
      tenant: { type: "string", default: "default" },
      cases: { type: "string", default: "[]" },
    },
  });
  const channel = openChannel(values.gateway);
  const gateway = new GatewayClient(channel.transport, values.tenant);
  try {
    const taken: Taken[] = [];
    for (const one of JSON.parse(values.cases) as Case[]) taken.push(await echo(gateway, one));
    console.log(JSON.stringify(taken));
  } finally {
    await gateway.close();
    channel.close();
  }
}

await main();
