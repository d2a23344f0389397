import { describe, expect, it } from "vitest";
import { commandOf, type Shown } from "../../src/state/exports";

const shown = (patch: Partial<Shown> = {}): Shown => ({
  route: { view: "overview" },
  logdir: "/runs",
  sideFile: "demo/rank0/plugins/tb_memplugin/window-000000.mem",
  device: "cuda:0",
  step: 5,
  ...patch,
});

describe("the command for a view", () => {
  it("names the window, the step and the device", () => {
    expect(commandOf(shown())).toBe(
      "tb-memplugin peak /runs/demo/rank0/plugins/tb_memplugin/window-000000.mem --step 5 --device cuda:0",
    );
  });
  it.each([
    ["timeline", "peak", "--by phase"],
    ["modules", "peak", "--by module"],
    ["stacks", "peak", "--by line"],
  ] as const)("divides as %s does", (view, name, by) => {
    const command = commandOf(shown({ route: { view, by: "phase" } }))!;
    expect(command.startsWith(`tb-memplugin ${name} `)).toBe(true);
    expect(command).toContain(by);
  });
  it("is the highest of all steps for a whole window", () => {
    expect(commandOf(shown({ step: null }))).not.toContain("--step");
  });
  it("takes no division that the command does not know", () => {
    expect(commandOf(shown({ route: { view: "timeline", by: "$(reboot)" } }))).toContain("--by category");
  });
  it("is none where no command tells the same, and where no folder is known", () => {
    expect(commandOf(shown({ route: { view: "compare" } }))).toBeNull();
    expect(commandOf(shown({ logdir: "" }))).toBeNull();
  });
  it("quotes names for the shell", () => {
    expect(commandOf(shown({ logdir: "/my runs/it's; rm -rf ~" }))).toContain(` '/my runs/it'\\''s; rm -rf ~/demo/`);
  });
  it.each(["\n", "\u0003", "\u001b", "\u009b"])("is none where pasting the name would do more than name it (%j)", (sign) => {
    expect(commandOf(shown({ sideFile: `a${sign}b` }))).toBeNull();
  });
});
