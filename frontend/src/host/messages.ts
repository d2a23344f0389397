/**
 * The guest's end of TensorBoard's experimental plugin messages: JSON over a MessagePort that we hand to the parent.
 * Each message is {type, id, payload, error, isReply}; both ends answer every message that is not a reply.
 */

interface Message {
  type: string;
  id: number;
  payload: unknown;
  error: string | null;
  isReply: boolean;
}

interface Waiting {
  resolve: (payload: unknown) => void;
  reject: (error: Error) => void;
}

export interface Host {
  /** Asks the host; rejects when it answers with an error or not within `patience` milliseconds. */
  ask: (type: string, payload?: unknown, patience?: number) => Promise<unknown>;
  /** Calls back whenever the host sends this type. */
  on: (type: string, callback: (payload: unknown) => void) => void;
}

export const RUNS_CHANGED = "experimental.RunsChanged";
export const DATA_RELOADED = "experimental.DataReloaded";
export const GET_RUNS = "experimental.GetRuns";

/** Opens the channel; null where there is no page above this one. */
export function connect(): Host | null {
  if (window.parent === window) return null;
  const channel = new MessageChannel();
  const host = speak(channel.port1);
  window.parent.postMessage("experimental.bootstrap", "*", [channel.port2]);
  return host;
}

/** The protocol on one port. */
export function speak(
  port: Pick<MessagePort, "postMessage" | "start"> & { onmessage: MessagePort["onmessage"] },
): Host {
  const waiting = new Map<number, Waiting>();
  const callbacks = new Map<string, (payload: unknown) => void>();
  let nextId = 0;
  const send = (message: Message): void => port.postMessage(JSON.stringify(message));

  port.onmessage = (event: MessageEvent): void => {
    const message = parsed(event.data);
    if (!message) return;
    if (message.isReply) {
      const wait = waiting.get(message.id);
      waiting.delete(message.id);
      if (message.error) wait?.reject(new Error(String(message.error)));
      else wait?.resolve(message.payload);
      return;
    }
    callbacks.get(message.type)?.(message.payload);
    send({ type: message.type, id: message.id, payload: null, error: null, isReply: true });
  };
  port.start();

  return {
    on: (type, callback) => void callbacks.set(type, callback),
    ask: (type, payload = null, patience = 3000) =>
      new Promise((resolve, reject) => {
        const id = nextId++;
        waiting.set(id, { resolve, reject });
        setTimeout(() => waiting.delete(id) && reject(new Error(`TensorBoard did not answer ${type}.`)), patience);
        send({ type, id, payload, error: null, isReply: false });
      }),
  };
}

function parsed(data: unknown): Message | null {
  if (typeof data !== "string") return null;
  try {
    const message = JSON.parse(data) as Message | null;
    return message && typeof message.type === "string" ? message : null;
  } catch {
    return null;
  }
}
