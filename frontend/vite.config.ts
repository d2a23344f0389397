import { defineConfig } from "vite";

// TensorBoard imports static/index.js by that name and calls its render(); everything else may be hashed.
export default defineConfig({
  base: "./",
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: "../tb_memplugin/server/static",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    modulePreload: false,
    rolldownOptions: {
      input: "src/index.tsx",
      preserveEntrySignatures: "strict",
      output: { entryFileNames: "index.js", chunkFileNames: "chunk-[hash].js", assetFileNames: "[name][extname]" },
    },
  },
});
