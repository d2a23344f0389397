/** The page of `tb-memplugin export --to html`: its data stand in the page itself. */
import { render } from "preact";
import { followTheme } from "../host/theme";
import adviceStyle from "../views/style/advice.css?inline";
import controlStyle from "../views/style/controls.css?inline";
import shellStyle from "../views/style/shell.css?inline";
import stateStyle from "../views/style/states.css?inline";
import tableStyle from "../views/style/tables.css?inline";
import themeStyle from "../views/style/theme.css?inline";
import viewStyle from "../views/style/views.css?inline";
import type { ReportData } from "./recording";
import { Report } from "./report";
import reportStyle from "./report.css?inline";

const style = document.createElement("style");
style.textContent = [themeStyle, shellStyle, controlStyle, stateStyle, tableStyle, viewStyle, adviceStyle, reportStyle].join("\n");
document.head.append(style);
followTheme();
const root = document.createElement("div");
root.id = "memory-tab";
document.body.append(root);
const data = JSON.parse(document.getElementById("report-data")!.textContent!) as ReportData;
render(<Report data={data} />, root);
