// A JavaScript client of the Open Inference Protocol, written with nothing but its .proto file.
//
//   npm ci
//   node client.js 127.0.0.1:8001 MODEL
//
// requests the model's metadata, infers once by a call and three times on a stream, and prints the answers as JSON.
// Every element of every input is 1; free dimensions have size 1.

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { fileURLToPath } from "node:url";

const PROTOS = fileURLToPath(new URL("../../protos", import.meta.url));

const ARRAYS = {
  BOOL: Uint8Array,
  UINT8: Uint8Array,
  UINT16: Uint16Array,
  UINT32: Uint32Array,
  UINT64: BigUint64Array,
  INT8: Int8Array,
  INT16: Int16Array,
  INT32: Int32Array,
  INT64: BigInt64Array,
  FP32: Float32Array,
  FP64: Float64Array,
};

export class InferenceClient {
  constructor(target) {
    const options = { keepCase: true, longs: Number, defaults: true, oneofs: true, includeDirs: [PROTOS] };
    const { inference } = grpc.loadPackageDefinition(protoLoader.loadSync("inference.proto", options));
    const unlimited = { "grpc.max_receive_message_length": -1, "grpc.max_send_message_length": -1 };
    this.stub = new inference.GRPCInferenceService(target, grpc.credentials.createInsecure(), unlimited);
  }

  close() {
    this.stub.close();
  }

  // One call of a unary RPC; rejects with grpc's error, which has `code` and `details`.
  call(rpc, request, { timeoutMs = 10_000 } = {}) {
    return new Promise((resolve, reject) => {
      const deadline = Date.now() + timeoutMs;
      this.stub[rpc](request, { deadline }, (error, response) => (error ? reject(error) : resolve(response)));
    });
  }

  metadata(model) {
    return this.call("ModelMetadata", { name: model });
  }

  async infer(model, tensors, options) {
    return read(await this.call("ModelInfer", request(model, tensors), options));
  }

  // Answers come in the order of the requests; one that failed has `error` and nothing else besides its id.
  async *stream(requests, { timeoutMs = 10_000 } = {}) {
    const call = this.stub.ModelStreamInfer({ deadline: Date.now() + timeoutMs });
    for (const each of requests) call.write(request(each.model, each.tensors, each.id));
    call.end();
    for await (const answer of call) {
      const response = answer.infer_response;
      yield answer.error_message ? { id: response.id, error: answer.error_message } : read(response);
    }
  }
}

// A tensor is {name, datatype, shape, data}, data a typed array of the datatype.
function request(model, tensors, id = "") {
  return {
    model_name: model,
    id,
    inputs: tensors.map(({ name, datatype, shape }) => ({ name, datatype, shape })),
    raw_input_contents: tensors.map(({ data }) => Buffer.from(data.buffer, data.byteOffset, data.byteLength)),
  };
}

function read(response) {
  const outputs = response.outputs.map(({ name, datatype, shape }, index) => {
    // A view needs its first byte where an element may begin, which a slice of a message need not be.
    const bytes = Uint8Array.from(response.raw_output_contents[index]);
    return { name, datatype, shape, data: new (arrayOf(datatype))(bytes.buffer) };
  });
  return { id: response.id, model: response.model_name, version: response.model_version, outputs };
}

function arrayOf(datatype) {
  const array = ARRAYS[datatype];
  if (!array) throw new Error(`expected one of ${Object.keys(ARRAYS).join(", ")}, got ${datatype}`);
  return array;
}

function ones({ name, datatype, shape }) {
  const sizes = shape.map((size) => Math.max(size, 1));
  const data = new (arrayOf(datatype))(sizes.reduce((product, size) => product * size, 1));
  data.fill(data instanceof BigInt64Array || data instanceof BigUint64Array ? 1n : 1);
  return { name, datatype, shape: sizes, data };
}

function readable(key, value) {
  if (ArrayBuffer.isView(value)) return Array.from(value, Number);
  return value;
}

async function main(target, model) {
  const client = new InferenceClient(target);
  try {
    const metadata = await client.metadata(model);
    const tensors = metadata.inputs.map(ones);
    const answer = await client.infer(model, tensors);
    const streamed = [];
    const requests = ["a", "b", "c"].map((id) => ({ id, model: id === "b" ? `${model}-nosuch` : model, tensors }));
    for await (const each of client.stream(requests)) streamed.push(each);
    console.log(JSON.stringify({ metadata, answer, streamed }, readable));
  } catch (error) {
    console.error(error.details ? `${grpc.status[error.code]}: ${error.details}` : error.message);
    process.exitCode = 1;
  } finally {
    client.close();
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const [target, model] = process.argv.slice(2);
  if (model) await main(target, model);
  else {
    console.error("usage: node client.js HOST:PORT MODEL");
    process.exitCode = 2;
  }
}
