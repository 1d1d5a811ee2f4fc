/**
 * An agent harness in TypeScript: it runs one whole rollout over gRPC and prints its receipt.
 *
 *     npm run build
 *     node dist/clients/typescript/examples/rollout.js --gateway 127.0.0.1:7435 --rollout r1
 *
 * The agent walks on a line. Every word that the model says is a step: east when the word has an
 * even number of letters, else west. The harness tells it where it stands, until it is three steps
 * from where it began or its turns are used up.
 */

import { parseArgs } from "node:util";

import { type JsonObject, toJson } from "@bufbuild/protobuf";

import {
  CallforestError,
  type Channel,
  CompletionApi,
  GatewayClient,
  openChannel,
  ReceiptSchema,
  RolloutOwner,
  type RolloutOutcome,
} from "../src/index.js";

const RULES = "Walk. A word of even length is a step east, any other a step west.";
const GOAL = 3;
const ANSWER_TOKENS = 32;
const HISTORY_LINE = '{"step": 1, "at": 0}\n';
const HISTORY_LINES = 64;

/** Steps east less steps west that an answer asks for. */
function stepsOf(answer: string): number {
  const words = answer.split(" ").filter((word) => word !== "");
  return words.reduce((sum, word) => sum + (word.length % 2 === 0 ? 1 : -1), 0);
}

interface Walk {
  readonly captureKey: string;
  readonly model: string;
  readonly turns: number;
  readonly historyBytes: number;
}

/** Play the rollout; the last response is the scored one. */
async function play(
  gateway: GatewayClient,
  { captureKey, model, turns, historyBytes }: Walk,
): Promise<RolloutOutcome> {
  const messages: JsonObject[] = [{ role: "system", content: RULES }];
  const told = { role: "user", content: HISTORY_LINE.repeat(HISTORY_LINES) };
  const toldBytes = JSON.stringify(told).length;
  for (let bytes = 0; bytes < historyBytes; bytes += toldBytes) messages.push(told);
  messages.push({ role: "user", content: "You stand at 0. Go." });
  let position = 0;
  let responseId = "";
  let response = new Uint8Array();
  for (let turn = 0; turn < turns && Math.abs(position) < GOAL; turn += 1) {
    const request = { model, messages, seed: turn, max_completion_tokens: ANSWER_TOKENS };
    const served = await gateway.complete(captureKey, request, CompletionApi.CHAT);
    const { id, message } = read(served.response);
    position += stepsOf(message.content);
    messages.push(message, { role: "user", content: `You stand at ${position}. Go on.` });
    responseId = id;
    response = new Uint8Array(served.response);
  }
  const reward = Math.abs(position) / GOAL;
  return { reward, declaredResponseId: responseId, scoredResponse: response };
}

interface ChatResponse {
  readonly id: string;
  readonly message: { role: string; content: string };
}

/** Read a Chat Completions response. */
function read(bytes: Uint8Array): ChatResponse {
  const response = JSON.parse(new TextDecoder().decode(bytes)) as {
    id: string;
    choices: { message: { role: string; content: string | null } }[];
  };
  const message = response.choices[0]?.message;
  if (message === undefined) throw new Error("the response has no choice");
  return { id: response.id, message: { role: message.role, content: message.content ?? "" } };
}

async function main(): Promise<void> {
  const { values } = parseArgs({
    options: {
      admission: { type: "string", default: "127.0.0.1:7433" },
      ledger: { type: "string", default: "127.0.0.1:7432" },
      gateway: { type: "string", default: "127.0.0.1:7435" },
      finalizer: { type: "string", default: "127.0.0.1:7436" },
      tenant: { type: "string", default: "default" },
      model: { type: "string", default: "policy" },
      rollout: { type: "string", default: "walk" },
      group: { type: "string", default: "walks" },
      slot: { type: "string", default: "0" },
      turns: { type: "string", default: "4" },
      "history-bytes": { type: "string", default: "0" },
    },
  });
  const channels: Channel[] = [];
  const transport = (target: string): Channel["transport"] => {
    const channel = openChannel(target);
    channels.push(channel);
    return channel.transport;
  };
  const gateway = new GatewayClient(transport(values.gateway), values.tenant);
  const owner = new RolloutOwner(
    {
      admission: transport(values.admission),
      ledger: transport(values.ledger),
      finalizer: transport(values.finalizer),
    },
    { tenant: values.tenant },
  );
  try {
    const rollout = await owner.open(values.rollout);
    const outcome = await play(gateway, {
      captureKey: rollout.captureKey,
      model: values.model,
      turns: Number(values.turns),
      historyBytes: Number(values["history-bytes"]),
    });
    const place = { groupId: values.group, slot: Number(values.slot) };
    const receipt = await owner.finish(rollout, outcome, place);
    console.log(JSON.stringify(toJson(ReceiptSchema, receipt), undefined, 2));
  } finally {
    await gateway.close();
    for (const channel of channels) channel.close();
  }
}

try {
  await main();
} catch (error) {
  if (!(error instanceof CallforestError)) throw error;
  console.error(error.toString());
  process.exitCode = 1;
}
