"""GRPO on nodes of a Ray cluster, with vLLM servers on others, which may fail and come back.

ray job submit --working-dir . -- python examples/clusters/grpo_ray.py --nodes 2 --server_nodes 1 --shared /shared

Ray only places the processes: `prefrl` talks neither to it nor through it. /shared is a folder that all nodes see.
"""

import argparse
import os
import secrets
import subprocess

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--nodes", type=int, default=2, help="nodes that train")
parser.add_argument("--server_nodes", type=int, default=1, help="nodes that serve")
parser.add_argument("--gpus", type=int, default=8, help="GPUs of each node")
parser.add_argument("--shared", default="/shared")
parser.add_argument("--model", default="Qwen/Qwen2.5-7B-Instruct")


@ray.remote
def address() -> str:
    """Of the node that it runs on."""
    return ray.util.get_node_ip_address()


@ray.remote
def start(words: list[str], key: str) -> None:
    """Run a command on a node, to its end."""
    subprocess.run(words, env={**os.environ, "VLLM_API_KEY": key}, check=True)


def main() -> None:
    """Start the servers and the training, and end with the training."""
    options = parser.parse_args()
    ray.init()
    nodes, gpus, fleet = options.nodes, options.gpus, f"{options.shared}/fleet"
    group = placement_group([{"GPU": gpus, "CPU": 1}] * (nodes + options.server_nodes), strategy="STRICT_SPREAD")
    ray.get(group.ready())
    places = [PlacementGroupSchedulingStrategy(group, i) for i in range(nodes + options.server_nodes)]
    key, first = secrets.token_hex(32), ray.get(address.options(num_gpus=0, scheduling_strategy=places[0]).remote())
    serve = ["prefrl", "vllm-serve", "--model", options.model, "--tensor_parallel_size", str(gpus)]
    serve += ["--host", "0.0.0.0", "--join", fleet]
    train = ["prefrl", "launch", "grpo", "--config", "examples/grpo_vllm.yaml", "--model_name_or_path", options.model]
    train += ["--vllm_server_base_url", f"dir:{fleet}", "--vllm_server_timeout", "1800", "--main_process_ip", first]
    train += ["--num_machines", str(nodes), "--num_processes", str(nodes * gpus), "--accelerate_config", "zero3"]
    again = {"max_retries": -1, "retry_exceptions": True}  # a server that fails is started again
    for place in places[nodes:]:
        start.options(num_gpus=gpus, scheduling_strategy=place, **again).remote(serve, key)
    words = [[*train, "--machine_rank", str(rank)] for rank in range(nodes)]
    once = {"num_gpus": gpus, "max_retries": 0}
    ray.get([start.options(scheduling_strategy=places[i], **once).remote(words[i], key) for i in range(nodes)])


if __name__ == "__main__":
    main()
