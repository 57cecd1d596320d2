"""KServe's own gRPC client, in its own environment: `kserve_client.py TARGET MODEL ROWS` prints JSON.

ROWS requests of one row each are sent at the same time, then requests that have to fail.
"""

import asyncio
import json
import sys
from typing import Any

import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest


def request(model: str, value: float, **more: Any) -> InferRequest:
    tensor = InferInput(more.pop("tensor", "INPUT0"), [1, 16], "FP32")
    tensor.set_data_from_numpy(np.full((1, 16), value, np.float32), binary_data=more.pop("binary", True))
    return InferRequest(model_name=model, infer_inputs=[tensor], **more)


async def failure(call: Any) -> list[str]:
    try:
        await call
    except grpc.RpcError as error:
        return [error.code().name, error.details()]
    return ["OK", ""]


async def main(target: str, model: str, rows: int) -> dict[str, Any]:
    async with InferenceGRPCClient(target) as client:
        found: dict[str, Any] = {
            "live": await client.is_server_live(),
            "ready": await client.is_server_ready(),
            "model_ready": await client.is_model_ready(model),
        }
        requests = [request(model, n, request_id=f"r{n}", binary=n % 2 == 0) for n in range(rows)]
        answers = await asyncio.gather(*(client.infer(each) for each in requests))
        found["answers"] = [
            [each.id, each.model_name, each.model_version, *np.unique(each.outputs[0].as_numpy()).tolist()]
            for each in answers
        ]
        found["unknown"] = await failure(client.infer(request("nosuch", 0)))
        found["misnamed"] = await failure(client.infer(request(model, 0, tensor="WRONG")))
        found["late"] = await failure(client.infer(request(model, 0), timeout=0.2))
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))))
