// A stand-in for TensorBoard: a page with its orange bar and CSP, our frame in it, and answers from imagined runs.
//   node dev/serve.mjs [port]   then open http://localhost:6100/ (or /empty/, /failing/, /problems/, /slow/)
import { createServer } from "node:http";
import { readFile } from "node:fs/promises";
import { extname, join } from "node:path";
import { fileURLToPath } from "node:url";
import * as answers from "./answers.mjs";
import { runsFor } from "./runs.mjs";

const port = Number(process.argv[2] ?? 6100);
const bundle = join(fileURLToPath(new URL(".", import.meta.url)), "../../tb_memplugin/server/static");
const MIME = { ".js": "text/javascript", ".css": "text/css", ".map": "application/json", ".html": "text/html" };
const CSP =
  "default-src 'self';font-src 'self' data:;frame-src * data:;img-src 'self' data: blob:;object-src 'none';" +
  "style-src 'self' https://www.gstatic.com data: 'unsafe-inline';connect-src 'self' data: https://www.gstatic.com;script-src 'self'";
const entry = 'import("./static/index.js").then((m) => void m.render());';

const host = (
  dark,
) => `<!doctype html><style>body{margin:0;font:14px system-ui;display:flex;flex-direction:column;height:100vh}
header{background:#f57c00;color:#fff;padding:0 20px;height:48px;display:flex;gap:26px;align-items:center;font-size:13px;flex:none}b{font:20px system-ui}
iframe{border:0;flex:1}</style><body class="${dark ? "dark-mode" : ""}"><header><b>TensorBoard</b><span>TIME SERIES</span><span>SCALARS</span><span style="border-bottom:2px solid;line-height:46px">MEMORY</span></header>
<iframe src="data/plugin_entry.html?name=tb_memplugin"></iframe>`;

const fail = (status, what, where, fix) => ({ status, body: { error: { what, where, fix } } });

function answer(route, q, scenario) {
  if (scenario === "failing")
    return fail(
      500,
      "The event file ends in the middle of a record.",
      "/logs/demo/baseline/events.out.tfevents.1763712000",
      "Copy the file again, or remove it and reload.",
    );
  const runs = runsFor(scenario);
  if (route === "runs") return { status: 200, body: runsAnswer(runs, scenario) };
  const pick = (prefix) => {
    const run = runs.find((r) => r.run === q.get(`${prefix}run`));
    const step = run?.steps.find((s) => String(s.step) === q.get(`${prefix}step`));
    return run && step ? { run, step } : null;
  };
  const side = pick("");
  if (!side) return fail(404, `No step ${q.get("step")}.`, String(q.get("run")), "Pick a step that is listed.");
  const { run, step } = side;
  const t0 = Number(q.get("t0") ?? step.start),
    t1 = Number(q.get("t1") ?? step.end),
    px = Number(q.get("px") ?? 1000);
  const absent = () =>
    fail(
      404,
      "The side file with this step's events is missing.",
      `${run.run}/plugins/tb_memplugin/rank0.step${step.step}.mem`,
      "Copy the file from the machine that recorded it into the run's folder and reload.",
    );
  if (route === "step") return { status: 200, body: answers.stepAnswer(run, step) };
  if (route === "curve")
    return run.coarse && q.has("t0")
      ? absent()
      : { status: 200, body: answers.curve(run, step, q.get("by") ?? "category", t0, t1, px) };
  if (route === "moment")
    return run.coarse
      ? absent()
      : {
          status: 200,
          body: answers.moment(
            step,
            q.has("event") ? Number(q.get("event")) : answers.eventAt(step, Number(q.get("t"))),
            run,
          ),
        };
  if (route === "lanes") return { status: 200, body: answers.lanes(step, t0, t1, px) };
  if (route === "modules") return { status: 200, body: answers.modules(run, step) };
  if (route === "compare") return { status: 200, body: answers.compare(q.get("by"), side, pick("base_")) };
  return fail(404, `No route ${route}.`, route, "See docs/http_api.md.");
}

function runsAnswer(runs, scenario) {
  return {
    runs: runs.map((r) => ({
      run: r.run,
      workers: [
        {
          worker: "rank0",
          devices: [r.device],
          steps: r.steps.map((s) => ({ step: s.step, window: 0, devices: { [r.device]: answers.stats(s, r) } })),
        },
      ],
    })),
    problems:
      scenario === "problems"
        ? [
            {
              file: "/logs/demo/old/rank1.step4.mem",
              reason: "The file ends after 1,024 of 88,213 bytes.",
              fix: "Copy it again from the machine that recorded it.",
            },
            {
              file: "/logs/<img src=x onerror=alert(1)>/" + "x".repeat(300) + "\n\u0000.mem",
              reason: "Schema version 9 is newer than this plugin reads (1).",
              fix: "Upgrade tb_memplugin.",
            },
          ]
        : [],
    logdir: "/logs",
  };
}

const page = createServer(async (request, response) => {
  const url = new URL(request.url, "http://localhost");
  const [, scenario, rest] = /^\/(?:(empty|failing|problems|slow)(?=\/))?\/?(.*)$/.exec(url.pathname);
  const send = (status, type, body) =>
    response
      .writeHead(status, {
        "Content-Type": type,
        "Content-Security-Policy": CSP + (type === "text/html" ? " 'unsafe-inline'" : ""),
      })
      .end(body);
  try {
    if (rest === "") return send(200, "text/html", host(url.searchParams.has("dark")));
    if (rest === "data/plugin_entry.html")
      return send(
        200,
        "text/html",
        `<!DOCTYPE html><head><base href="plugin/tb_memplugin/" /></head><body><script type="module">${entry}</script></body>`,
      );
    const name = rest.replace("data/plugin/tb_memplugin/", "");
    if (name.startsWith("static/"))
      return send(200, MIME[extname(name)] ?? "text/plain", await readFile(join(bundle, name.slice(7))));
    if (scenario === "slow") await new Promise((r) => setTimeout(r, 2500));
    const { status, body } = answer(name, url.searchParams, scenario ?? "");
    send(status, "application/json", JSON.stringify(body));
  } catch (error) {
    send(500, "text/plain", String(error.stack));
  }
});
page.listen(port, () => console.log(`http://localhost:${port}/`));
