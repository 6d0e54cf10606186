// A whole upload made from what a call returned, for tests of ImportSnapshot.
#ifndef SPARSEGDN_TESTS_UNIT_ENGINE_UPLOAD_UTIL_H_
#define SPARSEGDN_TESTS_UNIT_ENGINE_UPLOAD_UTIL_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/frame_writer.h"
#include "tests/unit/engine/engine_test_util.h"

namespace sparsegdn::testing {

struct Piece {
  uint32_t tensor;
  uint64_t offset;
  std::string data;
  uint64_t hash;
};

// A whole upload, to be spoiled by a row of a table.
struct Upload {
  engine::Manifest manifest;
  std::vector<std::string> tensors;
  std::vector<Piece> pieces;
  uint64_t digest = 0;

  void Cut(size_t bytes) {
    pieces.clear();
    for (uint32_t t = 0; t < tensors.size(); ++t) {
      for (size_t at = 0; at < tensors[t].size(); at += bytes) {
        std::string data = tensors[t].substr(at, bytes);
        const uint64_t hash = engine::Xxh3(data);
        pieces.push_back({t, at, std::move(data), hash});
      }
    }
  }
  void Digest() {
    std::vector<uint64_t> hashes;
    for (const std::string& t : tensors) hashes.push_back(engine::Xxh3(t));
    digest = engine::DigestOf(hashes);
  }
  uint32_t IdOf(const std::string& name) const {
    for (uint32_t i = 0; i < manifest.tensors.size(); ++i) {
      if (manifest.tensors[i].name == name) return i;
    }
    ADD_FAILURE() << name;
    return 0;
  }
};

inline Upload UploadOf(const Collected& got) {
  Upload upload;
  upload.manifest = *got.manifest;
  upload.tensors = got.tensors;
  upload.Cut(300);
  upload.Digest();
  return upload;
}

inline absl::StatusOr<engine::SnapshotRef> Send(Harness& h, const Upload& upload) {
  auto import = h.engine().BeginImport(upload.manifest, 50, "t");
  if (!import.ok()) return import.status();
  for (const Piece& p : upload.pieces) {
    if (absl::Status s = (*import)->Add(p.tensor, p.offset, p.data, p.hash); !s.ok()) return s;
  }
  return (*import)->Finish(upload.digest);
}

inline engine::PrefillRequest AfterLast(int64_t tokens) {
  engine::PrefillRequest request = Harness::Prompt(tokens);
  request.snapshot_at = engine::SnapshotAt::kAfterLast;
  return request;
}

}  // namespace sparsegdn::testing

#endif  // SPARSEGDN_TESTS_UNIT_ENGINE_UPLOAD_UTIL_H_
