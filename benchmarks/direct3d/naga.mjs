// Translates FOLDER/NAME.wgsl of all NAMEs that its names.json lists into NAME.sm51, NAME.sm60 (HLSL of
// two shader models) and NAME.msl; prints what naga refuses as JSON: {NAME: {target: why}}.
//
// usage: node naga.mjs PACKAGE FOLDER, PACKAGE the unpacked npm package naga-wasm
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [given, folder] = process.argv.slice(2);
const { translate } = await import(pathToFileURL(path.resolve(given, "dist/node.js")));
const TARGETS = {
  sm51: { to: "hlsl", options: { shaderModel: "5_1" } },
  sm60: { to: "hlsl", options: { shaderModel: "6_0" } },
  msl: { to: "msl", options: { langVersion: [2, 4] } },
};

// wgpu trusts our loops to end (gpu/wgpu_native.py); the package bounds them all.
const trusted = (code) =>
  code
    .split("\n")
    .filter((line) => !/^\s*(uint2 |if \((metal::)?all\()?loop_bound(_\d+)? (-|=)?= ?/.test(line))
    .join("\n");

const refused = {};
for (const name of JSON.parse(fs.readFileSync(`${folder}/names.json`))) {
  const source = fs.readFileSync(`${folder}/${name}.wgsl`, "utf8");
  for (const [target, { to, options }] of Object.entries(TARGETS)) {
    try {
      const code = translate({ from: "wgsl", to, source, options });
      fs.writeFileSync(`${folder}/${name}.${target}`, trusted(code));
    } catch (error) {
      (refused[name] ??= {})[target] = error.formatted ?? String(error);
    }
  }
}
console.log(JSON.stringify(refused));
