// Calls functions of the page's modules: reads [module, function, arguments] as JSON lines, writes each result as one.
// Typed arrays become lists; {"$float32": [...]} and the like in the arguments become typed arrays.
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const folder = process.argv[2];
const TYPED = { $float32: Float32Array, $float64: Float64Array, $uint8: Uint8Array, $int8: Int8Array };

function revive(_, value) {
  for (const [name, Type] of Object.entries(TYPED)) if (value?.[name]) return Type.from(value[name]);
  return value?.$bigint ? BigInt(value.$bigint) : value;
}

function plain(_, value) {
  return ArrayBuffer.isView(value) ? Array.from(value) : value;
}

for await (const line of createInterface({ input: process.stdin })) {
  const [module, name, values] = JSON.parse(line, revive);
  const place = module.startsWith("./") ? new URL(module, import.meta.url) : pathToFileURL(`${folder}/${module}`);
  const loaded = await import(place.href);
  process.stdout.write(`${JSON.stringify((await loaded[name](...values)) ?? null, plain)}\n`);
}
