import { defineConfig } from "vite";

const common = {
  base: "./",
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
} as const;

const output = {
  outDir: "../tb_memplugin/server/static",
  target: "es2022",
  assetsInlineLimit: 0,
  modulePreload: false,
} as const;

// TensorBoard imports static/index.js by that name and calls its render(); everything else may be hashed.
const tab = defineConfig({
  ...common,
  build: {
    ...output,
    emptyOutDir: true,
    rolldownOptions: {
      input: "src/index.tsx",
      preserveEntrySignatures: "strict",
      output: { entryFileNames: "index.js", chunkFileNames: "chunk-[hash].js", assetFileNames: "[name][extname]" },
    },
  },
});

// `tb-memplugin export --to html` puts static/report.js into the page that it writes: one classic script.
const report = defineConfig({
  ...common,
  build: {
    ...output,
    emptyOutDir: false,
    rolldownOptions: {
      input: "src/report/index.tsx",
      output: { format: "iife", entryFileNames: "report.js" },
    },
  },
});

export default defineConfig(({ mode }) => (mode === "report" ? report : tab));
