// Input: the text of the server's token file. Promise: a table of hashes in which every token of
// the file finds its own tenant and nothing else does, or INVALID_ARGUMENT that names a line and
// quotes nothing.
#include <sstream>

#include "absl/strings/str_cat.h"
#include "server/service/tokens.h"
#include "tests/fuzz/fuzz_target.h"

namespace sparsegdn::fuzz {
namespace {

using service::TokenTable;

void CheckTable(const TokenTable& table, const std::string& text) {
  Require(table.size() > 0 && table.size() <= service::kMaxTokens, "a table of no or many tokens");
  std::istringstream lines(text);
  std::string line;
  size_t entries = 0;
  const auto is_known = [&](const std::string& token) {
    return text.find(absl::StrCat(" ", token)) != text.npos ||
           text.find(absl::StrCat("\t", token)) != text.npos;
  };
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string tenant, token, more;
    if (!(words >> tenant) || tenant[0] == '#') continue;
    ++entries;
    words >> token;
    Require(!(words >> more), "three words are accepted");
    if (token.rfind("sha256:", 0) == 0) continue;
    Require(table.TenantOf(token) == tenant, "a token finds another tenant");
    for (const std::string& other : {absl::StrCat(token, "x"), token.substr(1)}) {
      Require(is_known(other) || !table.TenantOf(other).has_value(), "another token is accepted");
    }
  }
  Require(entries == table.size(), "a table of another size");
}

}  // namespace

int FuzzBearerTokens(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<TokenTable> table = TokenTable::Parse(text);
  NoteOutcome(table.status());
  if (!table.ok()) {
    RequireRefusal(table.status(), {absl::StatusCode::kInvalidArgument}, 128);
    return 0;
  }
  // What is white space to a stream but not to the parser would be part of a word here.
  if (text.find_first_of(std::string("\v\f\0", 3)) == text.npos) CheckTable(*table, text);
  for (const char* wrong : {"", "x"}) {
    Require(!table->TenantOf(wrong).has_value(), "what is no token is accepted");
  }
  Require(size <= service::kMaxTokenBytes || !table->TenantOf(text).has_value(),
          "a file is accepted as a token");
  return 0;
}

std::vector<std::string> BearerTokensSeeds() {
  const std::string hash(64, 'a');
  std::string many;
  for (size_t i = 0; i <= service::kMaxTokens; ++i) {
    absl::StrAppend(&many, "t", i, " 0123456789abcdef", i, "\n");
  }
  return {"alice 0123456789abcdef\n",
          "# comment\r\n\n\tbob\t  abc-._~+/=0123456789 \r\n",
          absl::StrCat("a sha256:", hash, "\nb sha256:", std::string(64, 'B'), "\n"),
          absl::StrCat("a 0123456789abcdef\na sha256:", hash),
          "a 0123456789abcdef\nb 0123456789abcdef",
          absl::StrCat("a sha256:", hash.substr(1)),
          "alice",
          "",
          "a 0123456789abcde",
          absl::StrCat("a ", std::string(513, 'x')),
          absl::StrCat(std::string(300, 't'), " 0123456789abcdef"),
          std::string("a 0123456789abcdef\0\xff", 20),
          many};
}

}  // namespace sparsegdn::fuzz
