#!/usr/bin/env bash
# Serve a checkpoint folder with three tiers: in our reference engine, inside SGLang, or inside vLLM.
#
#     examples/serve.sh hiradix|sglang|vllm MODEL_DIR PAGES_DIR [further flags of the engine]
#
# Pages in PAGES_DIR outlive the server. Engines may share the folder: pages meet only where docs/vllm.md says so.
set -euo pipefail
if [ $# -lt 3 ]; then
  echo "usage: $0 hiradix|sglang|vllm MODEL_DIR PAGES_DIR [further flags of the engine]" >&2
  exit 2
fi
engine=$1 model=$2 pages=$3
shift 3

case $engine in
hiradix)
  exec hiradix serve --model-path "$model" --enable-hierarchical-cache \
    --hicache-storage-backend disk --file-storage-path "$pages" "$@"
  ;;
sglang)
  exec python -m sglang.launch_server --model-path "$model" --enable-hierarchical-cache \
    --radix-cache-backend hiradix --hicache-storage-backend disk \
    --hicache-storage-backend-extra-config "{\"disk_storage_path\": \"$pages\"}" "$@"
  ;;
vllm)
  exec vllm serve "$model" --kv-transfer-config "{
    \"kv_connector\": \"HiRadixConnector\", \"kv_role\": \"kv_both\",
    \"kv_connector_module_path\": \"hiradix.adapters.vllm\",
    \"kv_connector_extra_config\": {
      \"hicache_storage_backend\": \"disk\",
      \"hicache_storage_backend_extra_config\": {\"disk_storage_path\": \"$pages\"}}}" "$@"
  ;;
*)
  echo "unknown engine $engine: hiradix, sglang or vllm" >&2
  exit 2
  ;;
esac
