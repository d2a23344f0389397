import { describe, expect, it, vi } from "vitest";
import { speak } from "../../src/host/messages";

function wire() {
  const sent: string[] = [];
  const port = {
    onmessage: null as MessagePort["onmessage"],
    start: vi.fn(),
    postMessage: (text: string) => void sent.push(text),
  };
  const host = speak(port);
  const hear = (data: unknown) => port.onmessage!.call(port as unknown as MessagePort, { data } as MessageEvent);
  return { host, hear, sent };
}

describe("messages with TensorBoard", () => {
  it("answers a question once the reply with its number comes", async () => {
    const { host, hear, sent } = wire();
    const answer = host.ask("experimental.GetRuns");
    expect(JSON.parse(sent[0]!)).toEqual({
      type: "experimental.GetRuns",
      id: 0,
      payload: null,
      error: null,
      isReply: false,
    });
    hear(JSON.stringify({ type: "experimental.GetRuns", id: 0, payload: ["a"], error: null, isReply: true }));
    await expect(answer).resolves.toEqual(["a"]);
  });
  it("calls back and acknowledges what the host says", () => {
    const { host, hear, sent } = wire();
    const heard = vi.fn();
    host.on("experimental.DataReloaded", heard);
    hear(JSON.stringify({ type: "experimental.DataReloaded", id: 7, payload: null, error: null, isReply: false }));
    expect(heard).toHaveBeenCalledOnce();
    expect(JSON.parse(sent[0]!)).toMatchObject({ id: 7, isReply: true });
  });
  it("gives up on a silent host", async () => {
    const { host } = wire();
    await expect(host.ask("experimental.GetRuns", null, 5)).rejects.toThrow("did not answer");
  });
  it("bears nonsense", () => {
    const { hear, sent } = wire();
    for (const nonsense of ["{", "null", 3, '{"a":1}']) hear(nonsense);
    expect(sent).toEqual([]);
  });
});
