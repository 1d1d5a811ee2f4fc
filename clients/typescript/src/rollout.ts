/**
 * The rollout owner's side: open an attempt, let a harness use it, finish it, publish a group.
 *
 * All but `open` may be repeated; another `open` begins another attempt and gives the one before
 * up.
 */

import { randomUUID } from "node:crypto";

import type { MessageInitShape } from "@bufbuild/protobuf";
import { type Client, createClient, type Transport } from "@connectrpc/connect";

import { modeMismatch, peerUnavailable } from "./errors.js";
import {
  AdmissionService,
  type Attempt,
  CaptureMode,
  FinalizerService,
  type FinalizeGroupResponse,
  LedgerService,
  type Receipt,
  type SelectionSchema,
} from "./stubs.js";
import { callUnary } from "./unary.js";

/** How long a rollout owner waits for admitted calls, in milliseconds. */
export const SETTLE_WAIT_MS = 300_000;

/** Where the services are. */
export interface OwnerTransports {
  readonly admission: Transport;
  readonly ledger: Transport;
  readonly finalizer: Transport;
}

/** What an owner may be told. */
export interface OwnerOptions {
  /** Owns the rollouts; "default" unless given. */
  readonly tenant?: string;
  /** How long admitted calls may take to settle, in milliseconds; five minutes unless given. */
  readonly settleWaitMs?: number;
  /** The deadline of each call, waits apart, in milliseconds; ten seconds unless given. */
  readonly timeoutMs?: number;
  /** The deadline of each call that finalizes, in milliseconds; a minute unless given. */
  readonly finalizeTimeoutMs?: number;
}

/** One try at a rollout, ready for a harness. */
export interface OpenRollout {
  /** The logical rollout. */
  readonly rolloutId: string;
  /** Names the attempt in model calls. */
  readonly captureKey: string;
  /** The opened attempt. */
  readonly attempt: Attempt;
}

/** What the opening of an attempt may be told. */
export interface OpenOptions {
  /** How its calls are found and which train; unspecified, for the mesh's, unless given. */
  readonly mode?: CaptureMode;
}

/** How a rollout ended, as its harness says. */
export interface RolloutOutcome {
  /** Finite. */
  readonly reward: number;
  /** The scored response's id, if the harness declares one. */
  readonly declaredResponseId?: string;
  /** The scored response as JSON bytes. */
  readonly scoredResponse?: Uint8Array;
  /** The harness's ordinary result as JSON bytes, from which forest mode selects. */
  readonly result?: Uint8Array;
  /** The calls that train, of forest mode, instead of having a policy choose them. */
  readonly selection?: MessageInitShape<typeof SelectionSchema>;
  /** The environment keeps the rollout from training. */
  readonly environmentMasked?: boolean;
  /** Evidence that cannot be taken masks the rollout, so that its siblings train. */
  readonly maskRefusedSelection?: boolean;
}

/** A rollout's place. */
export interface GroupSlot {
  readonly groupId: string;
  /** From 0. */
  readonly slot: number;
}

/**
 * Opens, finishes and publishes rollouts.
 *
 * Its methods throw RefusedError when a service refuses, and UnavailableError when one does not
 * answer in time.
 */
export class RolloutOwner {
  readonly #admission: Client<typeof AdmissionService>;
  readonly #ledger: Client<typeof LedgerService>;
  readonly #finalizer: Client<typeof FinalizerService>;
  readonly #tenant: string;
  readonly #settleWaitMs: number;
  readonly #timeoutMs: number;
  readonly #finalizeTimeoutMs: number;

  constructor(transports: OwnerTransports, options: OwnerOptions = {}) {
    this.#admission = createClient(AdmissionService, transports.admission);
    this.#ledger = createClient(LedgerService, transports.ledger);
    this.#finalizer = createClient(FinalizerService, transports.finalizer);
    this.#tenant = options.tenant ?? "default";
    this.#settleWaitMs = options.settleWaitMs ?? SETTLE_WAIT_MS;
    this.#timeoutMs = options.timeoutMs ?? 10_000;
    this.#finalizeTimeoutMs = options.finalizeTimeoutMs ?? 60_000;
  }

  /** Open the next attempt of a rollout; the one before is sealed and never trains. */
  async open(rolloutId: string, options: OpenOptions = {}): Promise<OpenRollout> {
    const mode = options.mode ?? CaptureMode.UNSPECIFIED;
    const request = { tenant: this.#tenant, rolloutId, requestId: randomUUID(), mode };
    const { attempt } = await callUnary(
      (callOptions) => this.#admission.openAttempt(request, callOptions),
      this.#timeoutMs,
    );
    const opened = present(attempt, "Admission");
    // A service of an older release knows no modes and opens a chain, of which it says nothing.
    const actual = opened.mode === CaptureMode.UNSPECIFIED ? CaptureMode.CHAIN : opened.mode;
    if (mode !== CaptureMode.UNSPECIFIED && actual !== mode) {
      throw modeMismatch(opened.captureKey, CaptureMode[mode], CaptureMode[opened.mode]);
    }
    return { rolloutId, captureKey: opened.captureKey, attempt: opened };
  }

  /**
   * Close, settle, seal and finalize a rollout; give its receipt.
   *
   * A rollout that cannot train has a masked receipt that says why; that is no error.
   */
  async finish(
    rollout: OpenRollout,
    outcome: RolloutOutcome,
    { groupId, slot }: GroupSlot,
  ): Promise<Receipt> {
    const attempt = { tenant: this.#tenant, captureKey: rollout.captureKey };
    await callUnary((options) => this.#admission.closeAttempt(attempt, options), this.#timeoutMs);
    await callUnary(
      (options) =>
        this.#ledger.awaitSettled({ ...attempt, waitMs: this.#settleWaitMs }, options),
      this.#settleWaitMs + this.#timeoutMs,
    );
    const { attempt: sealed } = await callUnary(
      (options) => this.#ledger.sealAttempt(attempt, options),
      this.#timeoutMs,
    );
    const { epoch, revision } = present(sealed, "Ledger");
    const { rolloutId } = rollout;
    const request = { ...attempt, groupId, rolloutId, slot, epoch, revision, ...outcome };
    const { receipt } = await callUnary(
      (options) => this.#finalizer.finalizeRollout(request, options),
      this.#finalizeTimeoutMs,
    );
    return present(receipt, "Finalizer");
  }

  /** Publish a group whose rollouts are all finished. */
  async publish(groupId: string, rolloutCount: number): Promise<FinalizeGroupResponse> {
    return this.#finalizeGroup(groupId, rolloutCount, "");
  }

  /** Drop a group that cannot be finished; its position says so. */
  async abandon(
    groupId: string,
    rolloutCount: number,
    reason: string,
  ): Promise<FinalizeGroupResponse> {
    return this.#finalizeGroup(groupId, rolloutCount, reason);
  }

  async #finalizeGroup(
    groupId: string,
    rolloutCount: number,
    abandonReason: string,
  ): Promise<FinalizeGroupResponse> {
    const request = { tenant: this.#tenant, groupId, rolloutCount, abandonReason };
    return callUnary(
      (options) => this.#finalizer.finalizeGroup(request, options),
      this.#finalizeTimeoutMs,
    );
  }
}

function present<Value>(value: Value | undefined, peer: string): Value {
  if (value === undefined) throw peerUnavailable(peer, "an answer without content");
  return value;
}
