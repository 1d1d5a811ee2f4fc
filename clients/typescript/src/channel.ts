/** Connections to the services of a mesh. */

import { connect } from "node:net";

import type { Transport } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";

/**
 * Largest message that is sent or taken, in bytes: gRPC's own default. What is larger travels in
 * frames (docs/protocol.md, section "Large payloads").
 */
export const MESSAGE_BYTES_MAX = 4 << 20;

const KEEPALIVE = { pingIntervalMs: 30_000, pingTimeoutMs: 10_000 };

/** One connection to one service. It connects when it is first used, and again when it broke. */
export interface Channel {
  /** Carries the calls of generated clients. */
  readonly transport: Transport;
  /** End the connection and every call on it. */
  close(): void;
}

/**
 * Open a channel.
 *
 * @param target `host:port`, or `unix:/path` for a socket of this machine.
 */
export function openChannel(target: string): Channel {
  const path = target.startsWith("unix:") ? target.slice("unix:".length) : undefined;
  const baseUrl = path === undefined ? `http://${target}` : "http://localhost";
  const socket = path === undefined ? {} : { createConnection: () => connect(path) };
  const sessionManager = new Http2SessionManager(baseUrl, KEEPALIVE, socket);
  const transport = createGrpcTransport({
    baseUrl,
    sessionManager,
    readMaxBytes: MESSAGE_BYTES_MAX,
    writeMaxBytes: MESSAGE_BYTES_MAX,
    acceptCompression: [],
  });
  return { transport, close: () => sessionManager.abort() };
}
