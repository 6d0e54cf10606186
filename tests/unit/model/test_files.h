// Model folders made and broken by tests.
#ifndef SPARSEGDN_TESTS_UNIT_MODEL_TEST_FILES_H_
#define SPARSEGDN_TESTS_UNIT_MODEL_TEST_FILES_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace sparsegdn::model::testing {

// A folder that disappears with the object.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }
  void Write(const std::string& name, const std::string& content) const;
  std::string Read(const std::string& name) const;

 private:
  std::string path_;
};

// A copy of a bundled model's config.json, weights and index.
void CopyModel(const std::string& name, const TempDir& to);

// A safetensors file: the header as given, then `data`.
std::string SafetensorsFile(const std::string& header, const std::string& data);

// A file taken apart, to be changed and put together again.
struct Editable {
  struct Entry {
    std::string name, dtype;
    std::vector<int64_t> shape;
    std::string bytes;
  };
  explicit Editable(const std::string& file);
  Entry& at(const std::string& name);
  std::string Serialize() const;

  std::vector<Entry> entries;
};

}  // namespace sparsegdn::model::testing

#endif  // SPARSEGDN_TESTS_UNIT_MODEL_TEST_FILES_H_
